//! Runs a compiler as a child process, with a time limit.

use std::io::{self, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Interval between two looks at a child that has closed its output.
const POLL: Duration = Duration::from_millis(2);

/// The reason that there is no output.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoOutput {
    #[error(transparent)]
    System(#[from] io::Error),
    #[error("it did not finish within {} s and was stopped", limit.as_secs_f64())]
    TooLong { limit: Duration },
}

/// Runs `command` for at most `limit` and returns its output. The output comes through pipes, not
/// files: on a full disk a file would lose the compiler's words about it.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<Output, NoOutput> {
    let end = Instant::now() + limit;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let streams = (child.stdout.take().map(read), child.stderr.take().map(read));
    match finish(&mut child, streams, end) {
        Ok(Some(output)) => Ok(output),
        Ok(None) => {
            stop(&mut child);
            Err(NoOutput::TooLong { limit })
        }
        Err(error) => {
            stop(&mut child);
            Err(error.into())
        }
    }
}

/// What a thread has read of one stream.
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
) -> io::Result<Option<Output>> {
    let (Some(stdout), Some(stderr)) = (take(stdout, end)?, take(stderr, end)?) else {
        return Ok(None);
    };
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(Output {
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

/// Returns a stream's bytes, or none if it is still open at `end`.
fn take(stream: Option<Stream>, end: Instant) -> io::Result<Option<Vec<u8>>> {
    let Some(stream) = stream else {
        return Ok(Some(Vec::new()));
    };
    match stream.recv_timeout(end.saturating_duration_since(Instant::now())) {
        Ok(read) => read.map(Some),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("its output was lost")),
    }
}

/// Kills and reaps the child. A failure to kill means that the child has just ended.
fn stop(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Output, NoOutput> {
        output(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn output_and_status_come_back() {
        let done = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!(done.stdout, b"out\n");
        assert_eq!(done.stderr, b"err\n");
        assert_eq!(done.status.code(), Some(3));
    }

    #[test]
    fn a_child_that_hangs_is_stopped() {
        let start = Instant::now();
        // The first leaves a grandchild with its pipes, the second closes them.
        for script in ["sleep 30; true", "exec >&- 2>&-; sleep 30; true"] {
            let error = shell(script, Duration::from_millis(50)).unwrap_err();
            let expected = "it did not finish within 0.05 s and was stopped";
            assert_eq!(error.to_string(), expected);
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
