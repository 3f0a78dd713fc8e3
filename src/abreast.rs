//! Work on many things that waits for disks most of the time: several at once, by threads that end with
//! it.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// How many are worked on at once: what a disk takes in parallel, and no burden to the processor.
const ABREAST: usize = 16;

/// What comes of each, in order.
pub(crate) fn abreast<T: Sync, R: Send>(things: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(things.len()));
    let take = || {
        while let Some((at, thing)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, things.get(at)?)))
        {
            let outcome = work(thing);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((at, outcome));
        }
    };
    thread::scope(|scope| {
        for _ in 1..things.len().min(ABREAST) {
            scope.spawn(take);
        }
        take();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn the_outcomes_are_in_order() {
        let numbers: Vec<_> = (0..1000).collect();
        let doubles: Vec<_> = (0..1000).map(|number| 2 * number).collect();
        assert_eq!(abreast(&numbers, |number| 2 * number), doubles);
        assert_eq!(abreast(&[0; 0], |number| *number), [0; 0]);
    }

    #[test]
    fn several_are_worked_on_at_once() {
        let all = Barrier::new(ABREAST);
        abreast(&[(); ABREAST], |()| all.wait().is_leader());
    }
}
