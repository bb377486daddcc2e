//! The job directory: the folder through which a launcher and its ranks talk, with the job's
//! settings and a few named pipes. Ranks find it the same way whether `moesaic launch` or an
//! `mpiexec` in between has started them.

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
    /// Reports on the program: `started`, `ended CODE` or `failed CODE WORDS`, one line each.
    Status,
}

impl Pipe {
    pub const ALL: [Pipe; 3] = [Pipe::Out, Pipe::Err, Pipe::Status];
}

/// Settings of a job, which the launcher writes and every rank reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobConfig {
    /// The value of MASTER_PORT.
    pub port: u16,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// The processors of each rank; an empty list allows all.
    pub processors: Vec<Vec<usize>>,
}

/// The folder of one job.
pub struct JobDir(PathBuf);

impl JobDir {
    /// Returns the job directory at `folder`, which need not exist yet.
    pub fn at(folder: &Path) -> JobDir {
        JobDir(folder.to_path_buf())
    }

    /// Writes the settings and makes the pipes of all ranks.
    pub fn create(&self, config: &JobConfig) -> io::Result<()> {
        let value = json!({
            "port": config.port,
            "grace": config.grace.as_millis() as u64,
            "processors": config.processors,
        });
        fs::write(self.0.join("job.json"), value.to_string())?;
        for rank in 0..config.processors.len() {
            for pipe in Pipe::ALL {
                system::make_fifo(&self.path(rank, pipe))?;
            }
        }
        system::make_fifo(&self.liveness_pipe())
    }

    /// Reads the settings.
    pub fn read_config(&self) -> io::Result<JobConfig> {
        let odd = || io::Error::other("the settings of the job cannot be read");
        let value: Value = serde_json::from_slice(&fs::read(self.0.join("job.json"))?)?;
        let number = |name: &str| value[name].as_u64().ok_or_else(odd);
        let list = |value: &Value| -> Option<Vec<usize>> {
            let numbers = value.as_array()?.iter();
            numbers.map(|n| Some(n.as_u64()? as usize)).collect()
        };
        let processors = value["processors"].as_array().ok_or_else(odd)?.iter();
        Ok(JobConfig {
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

    /// Returns the path of the liveness pipe. The launcher alone holds it open for writing, so
    /// ranks read the end of the file when the launcher ends in any way or closes it to end them.
    fn liveness_pipe(&self) -> PathBuf {
        self.0.join("alive")
    }

    /// Opens the launcher's end of [`JobDir::liveness_pipe`].
    pub fn hold_liveness_pipe(&self) -> io::Result<File> {
        // With both directions, opening does not wait for a reader.
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).open(self.liveness_pipe())
    }

    /// Opens a rank's end of [`JobDir::liveness_pipe`].
    pub fn watch_liveness_pipe(&self) -> io::Result<File> {
        system::open_fifo(&self.liveness_pipe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let job_dir = JobDir::at(folder.path());
        let config = JobConfig {
            port: 29500,
            grace: Duration::from_millis(1500),
            processors: vec![vec![0, 2], Vec::new()],
        };
        job_dir.create(&config).unwrap();
        assert_eq!(job_dir.read_config().unwrap(), config);
        for odd in [
            "",
            "{}",
            "{\"port\": 1, \"grace\": 2, \"processors\": [[-1]]}",
        ] {
            fs::write(folder.path().join("job.json"), odd).unwrap();
            assert!(job_dir.read_config().is_err(), "{odd}");
        }
    }
}
