//! A process of a kernel program and what is said to it.

use crate::machine::Machine;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

/// Longer than any kernel takes: one that loops for ever is an error.
const PATIENCE: Duration = Duration::from_secs(300);

/// Blocks to run: the address of the entry, the range, the grid, the address of
/// scratch memory (0: none), and values.
pub(crate) struct Request<'a> {
    pub(crate) entry: u64,
    pub(crate) blocks: [i64; 2],
    pub(crate) grid_x: i64,
    pub(crate) scratch: u64,
    pub(crate) values: &'a [u64],
}

/// A running kernel program that waits for requests.
pub(crate) struct Program {
    child: Child,
    line: UnixStream,
}

impl Program {
    /// Starts the file on `machine`, with `memory` as the device's memory.
    pub(crate) fn start(machine: &Machine, file: &Path, memory: &File) -> io::Result<Program> {
        let (line, theirs) = UnixStream::pair()?;
        line.set_read_timeout(Some(PATIENCE))?;
        let child = machine
            .command(file)
            .stdin(Stdio::from(memory.try_clone()?))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Program { child, line })
    }

    /// Runs the blocks and waits for them.
    ///
    /// # Errors
    /// When the kernel ended the program or gives no answer; the process is of
    /// no use then.
    pub(crate) fn run(&mut self, request: &Request<'_>) -> Result<(), String> {
        match self.exchange(request) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(format!("no answer in {} seconds", PATIENCE.as_secs()))
            }
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
        self.line.read_exact(&mut [0; 8])
    }

    /// How it ended, and what it said then.
    fn last_words(&mut self) -> String {
        let mut said = String::new();
        if let Some(mut stream) = self.child.stderr.take() {
            // Whatever was read before an error is worth showing.
            let _ = stream.read_to_string(&mut said);
        }
        let status = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        format!("the emulated program ended ({status})\n{}", said.trim())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
