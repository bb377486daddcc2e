//! The process of a kernel program, and its messages.

use crate::machine::ProgramHost;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time for a kernel: one that loops for ever is an error.
const PATIENCE: Duration = Duration::from_secs(300);

/// A request to run blocks: the address of the entry, the range, the grid, the
/// address of scratch memory (0 for none), and values.
pub(crate) struct Request<'a> {
    pub(crate) entry: u64,
    pub(crate) blocks: [i64; 2],
    pub(crate) grid_x: i64,
    pub(crate) scratch: u64,
    pub(crate) values: &'a [u64],
}

/// Longest time for which a file may be busy. A child that another thread forks
/// has the file open for writing until its exec, if the file was written
/// meanwhile.
const BUSY: Duration = Duration::from_secs(5);

/// Starts a child process once its file is no longer busy.
fn spawned(command: &mut Command) -> io::Result<Child> {
    let started = Instant::now();
    loop {
        match command.spawn() {
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && started.elapsed() < BUSY =>
            {
                thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

/// The reason a launch on an emulated CPU failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The program cannot be started.
    #[error("{host} cannot be started: {source}")]
    NotStarted { host: String, source: io::Error },
    /// The kernel runs for too long.
    #[error("no answer in {} seconds", PATIENCE.as_secs())]
    NoAnswer,
    /// The kernel ended the program.
    #[error("the emulated program ended ({status})\n{said}")]
    Ended { status: String, said: String },
    /// The kernel wrote behind an allocation.
    #[error("it wrote {at} bytes behind the end of the {bytes} bytes at {address:#x}")]
    Beyond { at: usize, bytes: u64, address: u64 },
    /// The device's memory cannot be read back.
    #[error(transparent)]
    Fence(io::Error),
}

/// A running kernel program that waits for requests.
pub(crate) struct Program {
    child: Child,
    line: UnixStream,
}

impl Program {
    /// Starts the file on `machine`, with `memory` as the device's memory.
    pub(crate) fn start(machine: &ProgramHost, file: &Path, memory: &File) -> io::Result<Program> {
        // Files 0 and 1 carry the memory and the requests, because the launcher
        // has no C library to open anything with. Standard error stays free for
        // the last words of a program that ends.
        let (line, theirs) = UnixStream::pair()?;
        // Without a limit a kernel that loops for ever would hang the caller.
        line.set_read_timeout(Some(PATIENCE))?;
        let mut command = machine.command(file);
        command
            .stdin(Stdio::from(memory.try_clone()?))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped());
        let child = spawned(&mut command)?;
        Ok(Program { child, line })
    }

    /// Runs the blocks and waits for them.
    ///
    /// # Errors
    /// The kernel ended the program, or gave no answer in time; the process is
    /// of no use then.
    pub(crate) fn run(&mut self, request: &Request<'_>) -> Result<(), RunError> {
        match self.exchange(request) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(RunError::NoAnswer),
            Err(_) => Err(self.last_words()),
        }
    }

    fn exchange(&mut self, request: &Request<'_>) -> io::Result<()> {
        let [first, last] = request.blocks;
        let numbers = [first, last, request.grid_x].map(i64::cast_unsigned);
        let head = [request.entry].into_iter().chain(numbers);
        let words = head
            .chain([request.scratch, request.values.len() as u64])
            .chain(request.values.iter().copied());
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.line.write_all(&bytes)?;
        // The answer is one word without meaning: that it comes says that all
        // blocks have run. A program that ended closes the socket instead.
        self.line.read_exact(&mut [0; 8])
    }

    /// Returns the exit status and the program's last output.
    fn last_words(&mut self) -> RunError {
        let mut said = String::new();
        if let Some(mut stream) = self.child.stderr.take() {
            // Output before an error is worth showing.
            let _ = stream.read_to_string(&mut said);
        }
        let status = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        RunError::Ended {
            status,
            said: said.trim().to_string(),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, OpenOptions};

    #[test]
    fn a_file_that_somebody_writes_is_started_when_they_are_done() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("true");
        fs::copy("/bin/true", &file).unwrap();
        let writer = OpenOptions::new().append(true).open(&file).unwrap();
        let busy = Command::new(&file).spawn().map(drop).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ExecutableFileBusy);
        let done = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(writer);
        });
        let mut child = spawned(&mut Command::new(&file)).unwrap();
        assert!(child.wait().unwrap().success());
        done.join().unwrap();
    }
}
