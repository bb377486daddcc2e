//! Runs a compiler as a child process, with a time limit.

use crate::error::{CompilerReason, SharedError};
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Time limit of a question about a compiler's version.
pub const QUESTION: Duration = Duration::from_secs(20);
/// Time limit of a compile, which takes seconds.
pub const COMPILE: Duration = Duration::from_secs(300);

/// Interval between two looks at a child that has closed its output.
const POLL: Duration = Duration::from_millis(2);

/// A child that did not end by itself.
#[derive(Debug, thiserror::Error)]
#[error("`{program}` {failure}")]
pub struct ChildError {
    /// The program, as it was named.
    pub program: String,
    /// The reason.
    pub failure: ChildFailure,
}

/// The reason that a child did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum ChildFailure {
    /// The system did not start it.
    #[error("could not be started: {0}")]
    Start(io::Error),
    /// The system did not say how it ended.
    #[error("could not be waited for: {0}")]
    Wait(io::Error),
    /// It took longer than it may.
    #[error("did not finish within {} s and was stopped", limit.as_secs_f64())]
    TimedOut {
        /// The time limit.
        limit: Duration,
    },
}

#[doc(hidden)]
impl From<ChildError> for CompilerReason {
    fn from(error: ChildError) -> CompilerReason {
        match error.failure {
            ChildFailure::Start(error) => CompilerReason::NotStarted(error.into()),
            _ => CompilerReason::Other(SharedError::new(error)),
        }
    }
}

/// A child that ended by itself.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Its output.
    pub stdout: String,
    /// Its messages.
    pub stderr: String,
}

impl Finished {
    /// Returns output and messages as one text.
    pub fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

/// Runs `command` without input for at most `limit`. The output comes through pipes, not files: on
/// a full disk a file would lose the compiler's words about it.
///
/// # Errors
/// The child did not start, or was stopped.
pub fn run(command: &mut Command, limit: Duration) -> Result<Finished, ChildError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let end = Instant::now() + limit;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let finished = command.spawn().map_err(ChildFailure::Start);
    let finished = finished.and_then(|mut child| {
        let streams = (child.stdout.take().map(read), child.stderr.take().map(read));
        let finished = finish(&mut child, streams, end).map_err(ChildFailure::Wait);
        let finished = finished.and_then(|it| it.ok_or(ChildFailure::TimedOut { limit }));
        if finished.is_err() {
            stop(&mut child);
        }
        finished
    });
    finished.map_err(|failure| ChildError { program, failure })
}

/// The bytes that a thread has read of one stream.
type Stream = Receiver<io::Result<Vec<u8>>>;

/// Reads a stream in a thread of its own. After a time limit nobody waits for the thread, because a
/// grandchild may keep the pipe open.
fn read(mut stream: impl Read + Send + 'static) -> Stream {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stream.read_to_end(&mut bytes).map(|_| bytes);
        // After the time limit nobody listens.
        let _ = sender.send(read);
    });
    receiver
}

/// Waits until `end`; returns none if the child has not finished by then.
fn finish(
    child: &mut Child,
    (stdout, stderr): (Option<Stream>, Option<Stream>),
    end: Instant,
) -> io::Result<Option<Finished>> {
    let (Some(stdout), Some(stderr)) = (take(stdout, end)?, take(stderr, end)?) else {
        return Ok(None);
    };
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(Finished {
                status,
                stdout,
                stderr,
            }));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// Returns a stream's text, or none if it is still open at `end`.
fn take(stream: Option<Stream>, end: Instant) -> io::Result<Option<String>> {
    let Some(stream) = stream else {
        return Ok(Some(String::new()));
    };
    match stream.recv_timeout(end.saturating_duration_since(Instant::now())) {
        Ok(read) => read.map(|bytes| Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("its output was lost")),
    }
}

/// Kills and reaps the child. A failure to kill means that the child has just ended.
fn stop(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Describes the end of a child that did not end well: `crashed with signal 6`.
pub fn ending(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("crashed with signal {signal}");
    }
    match status.code() {
        Some(code) => format!("ended with exit code {code}"),
        None => "ended without an exit code".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit_ms: u64) -> Result<Finished, ChildError> {
        let limit = Duration::from_millis(limit_ms);
        run(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn output_and_status_come_back() {
        let done = shell("echo out; echo err >&2; exit 3", 60_000).unwrap();
        assert_eq!(done.stdout, "out\n");
        assert_eq!(done.stderr, "err\n");
        assert_eq!(ending(done.status), "ended with exit code 3");
    }

    #[test]
    fn a_crash_names_the_signal() {
        let done = shell("kill -ABRT $$", 60_000).unwrap();
        assert_eq!(ending(done.status), "crashed with signal 6");
    }

    #[test]
    fn a_child_that_hangs_is_stopped() {
        let start = Instant::now();
        // The first leaves a grandchild with its pipes, the second closes them.
        for script in ["sleep 30; true", "exec >&- 2>&-; sleep 30; true"] {
            let error = shell(script, 50).unwrap_err();
            let expected = "`sh` did not finish within 0.05 s and was stopped";
            assert_eq!(error.to_string(), expected);
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_missing_program_is_named() {
        let mut command = Command::new("/no/such/clang");
        let error = run(&mut command, Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.program, "/no/such/clang");
        assert!(matches!(error.failure, ChildFailure::Start(_)), "{error}");
    }
}
