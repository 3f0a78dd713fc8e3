//! The CSI meaning of every error, and the one place where an error is logged.

use super::parse;
use crate::{
    chain::Chain,
    code,
    node::{self, HostError, device, filesystem},
    pool, qsd,
    volume::{self, Busy},
};
use rustix::io::Errno;
use std::{error::Error, io};
use tonic::{Code, Status};

/// The status for an error: its code, and the text of it and of all its causes.
fn status(code: Code, error: &dyn Error) -> Status {
    let text = shortened(Chain(error).to_string());
    let name = code::name(code);
    match code {
        Code::Internal | Code::DataLoss => tracing::error!(code = name, error = text, "failed"),
        _ => tracing::info!(code = name, error = text, "refused"),
    }
    Status::new(code, text)
}

/// The longest text of a status: it travels in a header, where clients take some kilobytes.
const LONGEST: usize = 1024;

/// Cuts a text that quotes a very long value.
fn shortened(mut text: String) -> String {
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push('…');
    }
    text
}

impl From<Busy> for Status {
    fn from(error: Busy) -> Self {
        status(Code::Aborted, &error)
    }
}

impl From<parse::Error> for Status {
    fn from(error: parse::Error) -> Self {
        let code = match &error {
            parse::Error::Token(_) => Code::Aborted,
            parse::Error::Offset { .. } => Code::OutOfRange,
            parse::Error::Range(range) => range_code(range),
            parse::Error::Topology { .. } => Code::ResourceExhausted,
            parse::Error::Host(host) => host_code(host),
            parse::Error::Filesystem(error) => filesystem_code(error),
            parse::Error::NoStaging => Code::FailedPrecondition,
            parse::Error::Source(_) => Code::NotFound,
            parse::Error::Empty(_)
            | parse::Error::TooLong { .. }
            | parse::Error::Control { .. }
            | parse::Error::Context { .. }
            | parse::Error::Size(_)
            | parse::Error::Attribute(_)
            | parse::Error::Parameter(_)
            | parse::Error::Secrets(_)
            | parse::Error::Negative { .. }
            | parse::Error::NotServed { .. } => Code::InvalidArgument,
        };
        status(code, &error)
    }
}

impl From<volume::InvalidName> for Status {
    /// An id that is not ours is unknown.
    fn from(error: volume::InvalidName) -> Self {
        Self::not_found(shortened(error.to_string()))
    }
}

impl From<volume::Error> for Status {
    fn from(error: volume::Error) -> Self {
        status(volume_code(&error), &error)
    }
}

impl From<node::Error> for Status {
    fn from(error: node::Error) -> Self {
        let code = match &error {
            node::Error::Volume(error) => volume_code(error),
            node::Error::Host(error) => host_code(error),
            node::Error::Busy(_) => Code::Aborted,
            node::Error::Parameter(_) | node::Error::Secrets(_) => Code::InvalidArgument,
            node::Error::NotStaged { .. }
            | node::Error::NotStagedFor { .. }
            | node::Error::StagedElsewhere { .. }
            | node::Error::Published { .. }
            | node::Error::WritableDevice { .. }
            | node::Error::OnlyRead { .. }
            | node::Error::NothingToRead { .. }
            | node::Error::Staged { .. }
            | node::Error::BoundToDaemon { .. }
            | node::Error::ImageOpen(_)
            | node::Error::EncryptedForReaders { .. }
            | node::Error::NotServed(_) => Code::FailedPrecondition,
            node::Error::StagedOtherwise { .. }
            | node::Error::PublishedOtherwise { .. }
            | node::Error::PublishedForOther { .. } => Code::AlreadyExists,
            node::Error::NotAt { .. } => Code::NotFound,
            // CSI: the RPC does not carry secrets that are valid for authentication.
            node::Error::Locked { .. } => Code::Unauthenticated,
            node::Error::Daemon { source, .. }
            | node::Error::Trial { source, .. }
            | node::Error::Workshop { source, .. }
            | node::Error::Source { source } => daemon_code(source),
            node::Error::Supervisor(_) | node::Error::Relay { .. } | node::Error::Ended { .. } => {
                Code::Unavailable
            }
            node::Error::Device { source, .. } => device_code(source),
            node::Error::Filesystem { source, .. } => filesystem_code(source),
            node::Error::Store { source, .. } => io_code(source.io_kind()),
            node::Error::Run { source, .. } => io_code(Some(source.kind())),
            node::Error::Attachment { .. }
            | node::Error::Boot { .. }
            | node::Error::Unformatted(_) => Code::Internal,
        };
        status(code, &error)
    }
}

fn range_code(error: &volume::RangeError) -> Code {
    match error {
        volume::RangeError::Empty
        | volume::RangeError::Negative { .. }
        | volume::RangeError::Reversed { .. } => Code::InvalidArgument,
        volume::RangeError::NoneFits { .. } => Code::OutOfRange,
    }
}

fn volume_code(error: &volume::Error) -> Code {
    match error {
        volume::Error::NotFound(_) | volume::Error::NoSnapshot(_) => Code::NotFound,
        volume::Error::Different { .. } | volume::Error::DifferentSnapshot { .. } => {
            Code::AlreadyExists
        }
        volume::Error::Damaged { .. }
        | volume::Error::DamagedSnapshot { .. }
        | volume::Error::Unreadable { .. } => Code::Internal,
        volume::Error::UnknownPool(_)
        | volume::Error::NotASource(_)
        | volume::Error::PlainSource(_)
        | volume::Error::SourceElsewhere { .. }
        | volume::Error::OfTwoVolumes { .. }
        | volume::Error::WrongOrder(_) => Code::InvalidArgument,
        volume::Error::PoolFull { .. } => Code::ResourceExhausted,
        volume::Error::TooLarge { .. }
        | volume::Error::SmallerThanMaster { .. }
        | volume::Error::NotSizeOfMaster { .. }
        | volume::Error::SmallerThanSource { .. }
        | volume::Error::Shrinks { .. } => Code::OutOfRange,
        volume::Error::Unrelated(_) | volume::Error::IsMaster { .. } => Code::FailedPrecondition,
        volume::Error::Pool { source, .. }
        | volume::Error::Snapshot { error: source, .. }
        | volume::Error::Layer { source, .. }
        | volume::Error::Capacity(source) => pool_code(source),
    }
}

/// A pool that is gone, damaged or read-only may be brought back.
fn pool_code(error: &pool::Error) -> Code {
    match (error, error.io_kind()) {
        (pool::Error::Gone { .. } | pool::Error::Unidentified { .. }, _)
        | (_, Some(io::ErrorKind::ReadOnlyFilesystem)) => Code::Unavailable,
        (_, kind) => io_code(kind),
    }
}

/// A full file system may be emptied, and a file it can never hold is out of range.
fn io_code(kind: Option<io::ErrorKind>) -> Code {
    match kind {
        Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => Code::ResourceExhausted,
        Some(io::ErrorKind::FileTooLarge) => Code::OutOfRange,
        _ => Code::Internal,
    }
}

fn host_code(error: &HostError) -> Code {
    match error {
        HostError::Malformed { .. } => Code::InvalidArgument,
        HostError::Unsuitable { .. } => Code::FailedPrecondition,
        HostError::Io { source, .. } => match source.kind() {
            io::ErrorKind::InvalidFilename => Code::InvalidArgument,
            io::ErrorKind::NotADirectory | io::ErrorKind::ReadOnlyFilesystem => {
                Code::FailedPrecondition
            }
            _ if source.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                Code::FailedPrecondition
            }
            kind => io_code(Some(kind)),
        },
    }
}

fn device_code(error: &device::Error) -> Code {
    match error {
        // Its daemon is stuck or has just died; the next one does better.
        device::Error::Io { source, .. } if source.kind() == io::ErrorKind::NotConnected => {
            Code::Unavailable
        }
        device::Error::Losetup { .. }
        | device::Error::Silent { .. }
        | device::Error::Small { .. } => Code::Unavailable,
        device::Error::Io { source, .. } => io_code(Some(source.kind())),
        _ => Code::Internal,
    }
}

fn filesystem_code(error: &filesystem::Error) -> Code {
    match error {
        filesystem::Error::Kind(_) | filesystem::Error::Flag { .. } => Code::InvalidArgument,
        filesystem::Error::Occupied { .. }
        | filesystem::Error::InUse { .. }
        | filesystem::Error::NotPermitted { .. } => Code::FailedPrecondition,
        filesystem::Error::Damaged { .. } => Code::DataLoss,
        filesystem::Error::Silent { .. } => Code::Unavailable,
        filesystem::Error::Io { source, .. } => io_code(Some(source.kind())),
        filesystem::Error::Place(error) => host_code(error),
        filesystem::Error::Device(error) => device_code(error),
        filesystem::Error::Tool { .. } => Code::Internal,
    }
}

fn daemon_code(error: &qsd::Error) -> Code {
    match error {
        // Another attempt may find a supervisor or a daemon that answers, or one that was replaced.
        qsd::Error::Supervisor(_) | qsd::Error::Ended(_) | qsd::Error::Outdated { .. } => {
            Code::Unavailable
        }
        qsd::Error::Monitor(error) => match error {
            qsd::MonitorError::Refused { .. } => Code::Internal,
            qsd::MonitorError::Connect(_)
            | qsd::MonitorError::Closed
            | qsd::MonitorError::Deadline { .. } => Code::Unavailable,
        },
        qsd::Error::Master(error) => master_code(error),
        qsd::Error::Locked => Code::Unauthenticated,
        qsd::Error::TooOld(_) => Code::FailedPrecondition,
        qsd::Error::Foreign { .. } => Code::Internal,
        qsd::Error::Place { source, .. } => io_code(Some(source.kind())),
    }
}

/// A server that says no may say yes later; QEMU has no better word for its reasons.
fn master_code(error: &qsd::MasterError) -> Code {
    match error {
        qsd::MasterError::Refused { .. } | qsd::MasterError::Silent { .. } => Code::Unavailable,
        qsd::MasterError::Unusable { .. } | qsd::MasterError::Shrunk { .. } => {
            Code::FailedPrecondition
        }
        qsd::MasterError::Secrets { .. } => Code::InvalidArgument,
        qsd::MasterError::Keys { source, .. } => io_code(Some(source.kind())),
    }
}
