//! Requests held back: rings parked, drained, let go again, and moved to another daemon.

use super::{
    backend::{Error, Kick, Tracking},
    link::{FIRST_RETRY, Link, Lost, Rings, Up, hang_up, has_ended},
    place::Place,
    session::Session,
};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// How long requests may take to end while their ring is parked. A throttled disk takes its time;
/// one that takes longer has a daemon that is to be replaced.
const DRAIN: Duration = Duration::from_secs(20);

impl Session {
    /// Parks one ring, if it runs, and waits until nothing is in flight on it.
    pub(super) fn drain_ring(&mut self, place: &mut Place, ring: u32) -> Result<(), Lost> {
        let rings = self.said.started_sizes();
        let rings: Vec<_> = rings.into_iter().filter(|(one, _)| *one == ring).collect();
        if self.link.is_parked() {
            return Ok(());
        }
        self.drain(place, &rings)
    }

    /// Parks rings and waits until nothing is in flight on them.
    fn drain(&mut self, place: &mut Place, rings: &[(u32, u32)]) -> Result<(), Lost> {
        self.begin_exchange(place);
        let (Some(inflight), Link::Up(up)) = (&self.inflight, &self.link) else { return Ok(()) };
        let numbers: Vec<_> = rings.iter().map(|(ring, _)| *ring).collect();
        up.backend.swap_kicks(&self.said, &numbers, inflight, Kick::Silent)?;
        let begin = Instant::now();
        while !inflight.held(rings).is_empty() {
            if has_ended(&up.backend.socket) {
                return Err(Lost::because("it ended while requests were in flight"));
            }
            if begin.elapsed() > DRAIN {
                let why = "requests in flight do not end".to_owned();
                return Err(Lost { why, deaf: true });
            }
            let pause = if begin.elapsed() < Duration::from_millis(20) { 50 } else { 1000 };
            if place.pass_time(Duration::from_micros(pause)).is_err() {
                return Err(Lost::because("the volume is detached"));
            }
        }
        Ok(())
    }

    /// Keeps the back-end from fetching requests, and waits until it holds none: a fence. The guest
    /// notices nothing but the time it takes. A front-end that starts a ring, or needs a back-end
    /// after this one was lost, ends it before its time.
    pub(super) fn pause(&mut self, place: &mut Place) -> Result<(), String> {
        if place.tracking == Tracking::Unavailable {
            return Err("this qemu-storage-daemon does not note requests in flight".to_owned());
        }
        if self.link.is_parked() {
            return Ok(());
        }
        if !self.link.is_up() {
            // A daemon that this is not connected to may still do what it has of one before.
            return Err("no daemon is connected".to_owned());
        }
        let rings = self.said.started_sizes();
        if self.inflight.is_none() && !rings.is_empty() {
            return Err("its requests are not noted".to_owned());
        }
        if let Err(lost) = self.drain(place, &rings) {
            let why = lost.why.clone();
            self.lose(place, lost); // the next one starts with the front-end's kicks
            return Err(why);
        }
        if let Link::Up(up) = &mut self.link {
            up.rings = Rings::Parked;
        }
        Ok(())
    }

    /// Lets requests flow again; whether they were held until now.
    pub(super) fn resume(&mut self, place: &mut Place) -> bool {
        if !self.link.is_parked() {
            return false;
        }
        match &mut self.link {
            Link::Down(down) => down.parked = false,
            Link::Up(up) => up.rings = Rings::Flowing,
        }
        self.begin_exchange(place);
        let (Some(inflight), Link::Up(up)) = (&self.inflight, &mut self.link) else { return true };
        up.busy = None;
        let rings = self.said.started();
        let resumed = up.backend.swap_kicks(&self.said, &rings, inflight, Kick::FrontEnd);
        if let Err(error) = resumed {
            self.lose(place, Lost::from(error));
        }
        true
    }

    /// Moves to another back-end: it is told everything first; then the rings stand still for as
    /// long as it takes to drain the old one and to start them on the new one. A new one that does
    /// not suit leaves the old one in place.
    ///
    /// `note` has everybody know where the volume is from now on. It is called while nothing is in
    /// flight anywhere, so whichever daemon a crash just before or after it leads to is right.
    pub(super) fn switch(
        &mut self,
        place: &mut Place,
        path: &Path,
        note: impl FnOnce() -> Result<(), String>,
    ) -> Result<Duration, String> {
        let text = |error: Error| crate::chain::Chain(&error).to_string();
        if place.tracking == Tracking::Unavailable || !self.link.is_up() {
            return Err("it can only move from a daemon that serves and notes requests".to_owned());
        }
        let next = self.connect(place, path).map_err(text)?;
        self.begin_exchange(place);
        let begin = Instant::now();
        let was_parked = self.link.is_parked();
        self.pause(place)?;
        if let Err(error) = note() {
            if !was_parked {
                self.resume(place);
            }
            return Err(error);
        }
        path.clone_into(&mut place.backend);
        self.link.close();
        if was_parked {
            hang_up(&next.socket); // it could not start without looking into the rings
            self.link = Link::parked(begin);
            place.counters.handovers += 1;
            return Ok(begin.elapsed());
        }
        let mut up = Up::new(next, FIRST_RETRY);
        up.busy = Some(false);
        self.link = Link::Up(up);
        self.begin_exchange(place);
        if let Link::Up(up) = &self.link
            && let Err(error) = up.backend.start_rings(&self.said, self.inflight.as_ref())
        {
            let why = crate::chain::Chain(&error).to_string();
            self.lose(place, Lost::from(error)); // and looked for again, as any that is lost
            return Err(why);
        }
        let stopped = begin.elapsed();
        self.compare_config(place);
        place.counters.handovers += 1;
        place.counters.note_stall(stopped);
        Ok(stopped)
    }
}
