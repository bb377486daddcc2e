//! Runs a compiler as a child process, with a time limit.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval between two looks at a running child.
const POLL: Duration = Duration::from_millis(2);

/// A child that did not end by itself.
#[derive(Debug, thiserror::Error)]
#[error("`{program}` {failure}")]
pub struct ChildError {
    /// The program, as it was named.
    pub program: String,
    pub failure: ChildFailure,
}

/// The reason that a child did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum ChildFailure {
    #[error("could not be started: {0}")]
    Start(io::Error),
    #[error("could not be waited for: {0}")]
    Wait(io::Error),
    #[error("did not finish within {} s and was stopped", limit.as_secs_f64())]
    TimedOut { limit: Duration },
}

/// A child that ended by itself.
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `command` in `folder` for at most `limit`. The output goes to files of
/// that folder, so a grandchild that outlives a killed child cannot keep a pipe
/// open.
pub fn run(command: &mut Command, folder: &Path, limit: Duration) -> Result<Finished, ChildError> {
    let (stdout, stderr) = (folder.join("stdout.txt"), folder.join("stderr.txt"));
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |failure| ChildError {
        program: program.clone(),
        failure,
    };
    let start = |error| failed(ChildFailure::Start(error));
    let mut child = command
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(File::create(&stdout).map_err(start)?)
        .stderr(File::create(&stderr).map_err(start)?)
        .spawn()
        .map_err(start)?;
    let status = wait(&mut child, limit).map_err(failed)?;
    let read =
        |path: &Path| std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(Finished {
        status,
        stdout: read(&stdout).unwrap_or_default(),
        stderr: read(&stderr).unwrap_or_default(),
    })
}

fn wait(child: &mut Child, limit: Duration) -> Result<ExitStatus, ChildFailure> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if start.elapsed() < limit => std::thread::sleep(POLL),
            Ok(None) => {
                stop(child);
                return Err(ChildFailure::TimedOut { limit });
            }
            Err(error) => return Err(ChildFailure::Wait(error)),
        }
    }
}

/// Kills and reaps the child. A failure to kill means that the child has just
/// ended.
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
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        run(
            command.args(["-c", script]),
            folder.path(),
            Duration::from_millis(limit_ms),
        )
    }

    #[test]
    fn output_and_status_come_back() {
        let done = shell("echo out; echo err >&2; exit 3", 60_000).unwrap();
        assert_eq!(
            (done.stdout.as_str(), done.stderr.as_str()),
            ("out\n", "err\n")
        );
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
        let Err(error) = shell("sleep 30", 50) else {
            panic!("a sleep of 30 s ended early")
        };
        let expected = "`sh` did not finish within 0.05 s and was stopped";
        assert_eq!(error.to_string(), expected);
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_missing_program_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("/no/such/clang");
        let Err(error) = run(&mut command, folder.path(), Duration::from_secs(1)) else {
            panic!("ran a program that does not exist")
        };
        assert_eq!(error.program, "/no/such/clang");
        assert!(matches!(error.failure, ChildFailure::Start(_)), "{error}");
    }
}
