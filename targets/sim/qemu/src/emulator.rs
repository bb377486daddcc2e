//! A process of QEMU and what is said to it.

use moesaic_kernel::CpuIsa;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longer than any kernel takes: one that loops for ever is an error.
const PATIENCE: Duration = Duration::from_secs(300);

/// The program that emulates: `MOESAIC_QEMU`, then Debian's names on `PATH`.
///
/// # Errors
/// What was tried and what to install.
pub(crate) fn find() -> Result<PathBuf, String> {
    find_with(|name| std::env::var_os(name))
}

fn find_with(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, String> {
    if let Some(asked) = variable("MOESAIC_QEMU").filter(|value| !value.is_empty()) {
        let program = PathBuf::from(asked);
        return match program.is_file() {
            true => Ok(program),
            false => Err(format!("MOESAIC_QEMU={} is no program", program.display())),
        };
    }
    let path = variable("PATH").unwrap_or_default();
    let names = ["qemu-aarch64-static", "qemu-aarch64"];
    let places = std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name)));
    places.into_iter().find(|place| place.is_file()).ok_or_else(|| {
        format!(
            "no emulator of aarch64 was found\ntried: MOESAIC_QEMU (not set), {} (not on PATH)\n\
             install Debian's qemu-user-static, or set MOESAIC_QEMU to a qemu-aarch64",
            names.join(", ")
        )
    })
}

/// The CPU to be: one that has the instruction set and little more, so that
/// an instruction too many shows.
fn cpu(isa: CpuIsa) -> &'static str {
    match isa {
        CpuIsa::NeonBf16 => "max",
        _ => "cortex-a72",
    }
}

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
pub(crate) struct Emulator {
    child: Child,
    line: UnixStream,
}

impl Emulator {
    /// Starts `program` under `qemu`, with `memory` as the device's memory.
    pub(crate) fn start(
        qemu: &Path,
        isa: CpuIsa,
        program: &Path,
        memory: &File,
    ) -> io::Result<Emulator> {
        let (line, theirs) = UnixStream::pair()?;
        line.set_read_timeout(Some(PATIENCE))?;
        let child = Command::new(qemu)
            .args(["-cpu", cpu(isa)])
            .arg(program)
            .stdin(Stdio::from(memory.try_clone()?))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Emulator { child, line })
    }

    /// Runs the blocks and waits for them.
    ///
    /// # Errors
    /// When the kernel ended the program or gives no answer; the emulator is
    /// of no use then.
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

impl Drop for Emulator {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let error = find_with(|_| None).unwrap_err();
        for part in [
            "MOESAIC_QEMU (not set)",
            "qemu-aarch64-static",
            "qemu-user-static",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let wrong = |name: &str| (name == "MOESAIC_QEMU").then(|| "/no/qemu".into());
        assert_eq!(
            find_with(wrong).unwrap_err(),
            "MOESAIC_QEMU=/no/qemu is no program"
        );
    }
}
