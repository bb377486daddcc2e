//! The two builds as programs.

use crate::Failed;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The builds, and a folder of each that its commands are run in.
pub struct Pair {
    programs: [PathBuf; 2],
    folders: [PathBuf; 2],
    limit: Duration,
}

/// How both took a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Both did it.
    Done,
    /// Both refused, with the same exit code.
    Refused,
    /// Exit codes that differ, or that a signal left none of.
    Different([Option<i32>; 2]),
    /// One was stopped after the limit.
    Stopped,
}

impl Pair {
    /// Both builds over empty folders below `work`, with a limit on each command.
    pub fn new(before: &Path, after: &Path, work: &Path, limit: Duration) -> Result<Pair, Failed> {
        let absolute = |path: &Path| {
            fs::canonicalize(path).map_err(|error| Failed::File(path.to_path_buf(), error))
        };
        Ok(Pair {
            programs: [absolute(before)?, absolute(after)?],
            folders: [work.join("before"), work.join("after")],
            limit,
        })
    }

    /// The same file or folder of both.
    pub fn both(&self, name: &str) -> [PathBuf; 2] {
        [self.folders[0].join(name), self.folders[1].join(name)]
    }

    /// Runs a command of both side by side, each in its folder, which is empty
    /// before.
    pub fn run(&self, arguments: &[&str]) -> Result<Outcome, Failed> {
        let before = self.start(0, arguments)?;
        let after = self.start(1, arguments)?;
        let started = Instant::now();
        let codes = [before, after].map(|child| self.wait(child, started));
        Ok(match codes {
            [Err(Late), _] | [_, Err(Late)] => Outcome::Stopped,
            [Ok(before), Ok(after)] if before != after || before.is_none() => {
                Outcome::Different([before, after])
            }
            [Ok(Some(0)), _] => Outcome::Done,
            _ => Outcome::Refused,
        })
    }

    fn start(&self, which: usize, arguments: &[&str]) -> Result<Child, Failed> {
        let (program, folder) = (&self.programs[which], &self.folders[which]);
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |error| Failed::File(path, error)
        };
        // Nothing to remove the first time.
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let said = File::create(folder.join("stderr")).map_err(failed(folder))?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(said).spawn().map_err(failed(program))
    }

    fn wait(&self, mut child: Child, started: Instant) -> Result<Option<i32>, Late> {
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Ok(status.code()),
                Ok(None) if started.elapsed() < self.limit => sleep(Duration::from_millis(3)),
                _ => {
                    // It may have ended by itself just now.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(Late);
                }
            }
        }
    }
}

/// A command that took longer than the limit.
struct Late;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_compared_and_long_commands_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let run = |before: &str, after: &str, arguments: &[&str]| {
            let [before, after] = [before, after].map(|name| Path::new("/bin").join(name));
            let limit = Duration::from_millis(200);
            let pair = Pair::new(&before, &after, dir.path(), limit).unwrap();
            pair.run(arguments).unwrap()
        };
        assert_eq!(run("true", "true", &[]), Outcome::Done);
        assert_eq!(run("false", "false", &[]), Outcome::Refused);
        let different = Outcome::Different([Some(0), Some(1)]);
        assert_eq!(run("true", "false", &[]), different);
        assert_eq!(run("sleep", "sleep", &["9"]), Outcome::Stopped);
        let killed = Outcome::Different([None, None]);
        assert_eq!(run("sh", "sh", &["-c", "kill -9 $$"]), killed);
    }
}
