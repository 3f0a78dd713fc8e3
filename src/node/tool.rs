//! Programs of the host that do one thing and end: `losetup`, `mkfs.ext4`, `umount`.
//!
//! Each has a deadline, after which it is killed, and none is run through a shell. What one that
//! hangs in the kernel still holds is the kernel's; nobody here waits for it.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::File,
    io,
    process::{Output, Stdio},
    time::Duration,
};
use tokio::{process::Command, time::timeout};

/// Where programs are looked for when the environment does not say.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// As much of what a program said is repeated in an error.
const SAID: usize = 400;

/// Why a program did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be started.
    #[error("running {program}")]
    Start {
        /// Its name.
        program: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// It said no.
    #[error("{program} {how}: {said}")]
    Failed {
        /// Its name.
        program: &'static str,
        /// Its exit code, or the signal that ended it.
        how: String,
        /// The end of what it said.
        said: String,
    },
    /// It did not end in time, and was killed.
    #[error("{program} did not end within {limit:?}")]
    TooLong {
        /// Its name.
        program: &'static str,
        /// How long it had.
        limit: Duration,
    },
}

/// One run of a program.
pub(super) struct Tool {
    program: &'static str,
    arguments: Vec<OsString>,
    input: Stdio,
    limit: Duration,
}

/// What a program that ended said.
pub(super) struct Ended {
    program: &'static str,
    output: Output,
}

impl Tool {
    /// A run that may take as long as `limit`.
    pub(super) fn new(program: &'static str, limit: Duration) -> Self {
        Self { program, arguments: Vec::new(), input: Stdio::null(), limit }
    }

    /// With one more argument.
    pub(super) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// With more arguments.
    pub(super) fn args(self, arguments: &[&str]) -> Self {
        arguments.iter().fold(self, Self::arg)
    }

    /// Holds `file` open, and so its lock, until it ends, whatever becomes of the driver.
    pub(super) fn holding(mut self, file: File) -> Self {
        self.input = file.into();
        self
    }

    /// Runs it; an exit code other than 0 is an error.
    pub(super) async fn run(self) -> Result<String, Error> {
        let ended = self.end().await?;
        if ended.code() == Some(0) { Ok(ended.text()) } else { Err(ended.refusal()) }
    }

    /// Runs it to its end, whatever its exit code.
    pub(super) async fn end(self) -> Result<Ended, Error> {
        let Self { program, arguments, input, limit } = self;
        let mut command = Command::new(program);
        // Nothing of the driver's environment changes what they do; what they say is read.
        command.env_clear().env("LC_ALL", "C");
        command.env("PATH", env::var_os("PATH").unwrap_or_else(|| PATH.into()));
        command.args(arguments).stdin(input).kill_on_drop(true);
        match timeout(limit, command.output()).await {
            Ok(Ok(output)) => Ok(Ended { program, output }),
            Ok(Err(source)) => Err(Error::Start { program, source }),
            Err(_) => Err(Error::TooLong { program, limit }),
        }
    }
}

impl Ended {
    /// The exit code; none where a signal ended it.
    pub(super) fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    /// Its standard output.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    /// The error that its exit code is.
    pub(super) fn refusal(&self) -> Error {
        Error::Failed {
            program: self.program,
            how: self.output.status.to_string(),
            said: self.said(),
        }
    }

    /// The end of what it said, on one line: its standard error, or where that is empty its output.
    pub(super) fn said(&self) -> String {
        let Output { stdout, stderr, .. } = &self.output;
        let said = if stderr.trim_ascii().is_empty() { stdout } else { stderr };
        let text = String::from_utf8_lossy(said);
        let lines: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let line = lines.join("; ");
        let skipped = line.chars().count().saturating_sub(SAID);
        line.chars().skip(skipped).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use std::time::Instant;

    fn sh(script: &str) -> Tool {
        Tool::new("sh", Duration::from_secs(1)).args(&["-c", script])
    }

    #[tokio::test]
    async fn an_error_names_program_code_and_the_end_of_what_it_said() {
        let error = sh("echo one >&2; seq 400 >&2; echo the end >&2; exit 7").run().await;
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("sh exit status: 7: "), "{text}");
        assert!(text.ends_with("; the end") && !text.contains("one") && text.len() < 450, "{text}");
        let missing = Tool::new("qsd-csi-no-such-program", Duration::from_secs(1)).run().await;
        assert!(matches!(missing, Err(Error::Start { .. })));
    }

    #[tokio::test]
    async fn one_that_takes_too_long_is_killed() {
        let begun = Instant::now();
        let scratch = tempfile::tempdir().unwrap();
        let mark = scratch.path().join("mark");
        let script = format!("sleep 2; touch {}", mark.display());
        assert!(matches!(sh(&script).run().await, Err(Error::TooLong { .. })));
        assert!(begun.elapsed() < Duration::from_millis(1500));
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!mark.exists(), "it was not killed");
    }

    #[tokio::test]
    async fn nothing_of_the_environment_is_passed_on_but_where_programs_are() {
        let names = sh("env | cut -d= -f1 | grep -v -e '^_$' -e '^PWD$' -e '^SHLVL$' | sort").run();
        assert_eq!(names.await.unwrap(), "LC_ALL\nPATH\n");
    }
}
