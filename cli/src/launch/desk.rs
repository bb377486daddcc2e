//! The folder through which a launcher and its ranks know of each other: a description
//! and a few named pipes. So it is the same whether `moesaic launch` or an `mpiexec` in
//! between has started the ranks.

use super::system;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The pipes of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pipe {
    Out,
    Err,
    /// Reports of the program's fate: `started`, `ended CODE` or `failed CODE WORDS`, a line each.
    Status,
}

impl Pipe {
    pub const ALL: [Pipe; 3] = [Pipe::Out, Pipe::Err, Pipe::Status];
}

/// What ranks are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The port of MASTER_PORT.
    pub port: u16,
    /// Between being asked to end and being ended.
    pub grace: Duration,
    /// The processors of each rank; none for all.
    pub processors: Vec<Vec<usize>>,
}

pub struct Desk(PathBuf);

impl Desk {
    /// The desk in a folder.
    pub fn at(folder: &Path) -> Desk {
        Desk(folder.to_path_buf())
    }

    /// Writes the description, and makes all pipes.
    pub fn furnish(&self, terms: &Terms) -> io::Result<()> {
        let value = json!({
            "port": terms.port,
            "grace": terms.grace.as_millis() as u64,
            "processors": terms.processors,
        });
        fs::write(self.0.join("terms"), value.to_string())?;
        for rank in 0..terms.processors.len() {
            for pipe in Pipe::ALL {
                system::make_fifo(&self.path(rank, pipe))?;
            }
        }
        system::make_fifo(&self.life())
    }

    /// Reads the description.
    pub fn terms(&self) -> io::Result<Terms> {
        let odd = || io::Error::other("the description of the job cannot be read");
        let value: Value = serde_json::from_slice(&fs::read(self.0.join("terms"))?)?;
        let number = |name: &str| value[name].as_u64().ok_or_else(odd);
        let list = |value: &Value| -> Option<Vec<usize>> {
            let numbers = value.as_array()?.iter();
            numbers.map(|n| Some(n.as_u64()? as usize)).collect()
        };
        let processors = value["processors"].as_array().ok_or_else(odd)?.iter();
        Ok(Terms {
            port: u16::try_from(number("port")?).map_err(|_| odd())?,
            grace: Duration::from_millis(number("grace")?),
            processors: processors
                .map(|own| list(own).ok_or_else(odd))
                .collect::<io::Result<_>>()?,
        })
    }

    pub fn path(&self, rank: usize, pipe: Pipe) -> PathBuf {
        let name = match pipe {
            Pipe::Out => "out",
            Pipe::Err => "err",
            Pipe::Status => "status",
        };
        self.0.join(format!("{rank}.{name}"))
    }

    /// A pipe that only the launcher holds open for writing: when it ends in any way, or
    /// wants its ranks to end, they see the end of the file.
    fn life(&self) -> PathBuf {
        self.0.join("life")
    }

    /// The launcher's end of [`Desk::life`].
    pub fn keep_alive(&self) -> io::Result<File> {
        // With both directions, opening does not wait for a reader.
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).open(self.life())
    }

    /// A rank's end of it.
    pub fn watch_life(&self) -> io::Result<File> {
        system::open_fifo(&self.life())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let desk = Desk::at(folder.path());
        let terms = Terms {
            port: 29500,
            grace: Duration::from_millis(1500),
            processors: vec![vec![0, 2], Vec::new()],
        };
        desk.furnish(&terms).unwrap();
        assert_eq!(desk.terms().unwrap(), terms);
        for odd in [
            "",
            "{}",
            "{\"port\": 1, \"grace\": 2, \"processors\": [[-1]]}",
        ] {
            fs::write(folder.path().join("terms"), odd).unwrap();
            assert!(desk.terms().is_err(), "{odd}");
        }
    }
}
