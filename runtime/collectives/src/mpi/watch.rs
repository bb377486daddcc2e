//! A deadline for `MPI_Init`, which waits for every process of the launcher and cannot be
//! cancelled.

use crate::topology::host_name;
use crate::transport::TransportError;
use crate::world::World;
use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// The exit code: the same as for every other failure before ranks have begun.
pub const CODE: i32 = 2;
/// The shortest deadline: libraries need a while to start where ranks outnumber processors,
/// however short the deadline of operations.
const LEAST: Duration = Duration::from_secs(5);
/// The pause before exit. Launchers kill the other ranks as soon as one ends, and each rank
/// should report first.
const TOGETHER: Duration = Duration::from_secs(1);

unsafe extern "C" {
    /// C's `_exit`: ends the process at once, without the library's exit handlers, which could
    /// wait forever.
    fn _exit(code: i32) -> !;
}

/// A guard that ends the process unless it is dropped in time.
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Starts the watchdog; `version` is the library's.
    pub fn begin(deadline: Duration, version: &str) -> Result<Watchdog, TransportError> {
        let limit = deadline.max(LEAST);
        let world = World::from_environment().ok().flatten();
        let rank = world.map(|world| format!("rank {} on {}: ", world.rank, host_name()));
        let rank = rank.unwrap_or_default();
        let words = words(limit, version, world);
        let words: String = words
            .lines()
            .map(|line| format!("{rank}{line}\n"))
            .collect();
        let (alive, ended) = mpsc::channel::<()>();
        let watch = move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // Written in one call, because other ranks write the same message at the same
                // time.
                let _ = std::io::stderr().write_all(words.as_bytes());
                thread::sleep(TOGETHER);
                // SAFETY: the argument is a number.
                unsafe { _exit(CODE) }
            }
        };
        let thread = thread::Builder::new().name("moesaic-mpi-init".to_string());
        let spawned = thread.spawn(watch);
        spawned.map_err(|error| TransportError::NoThread {
            purpose: "watch over MPI_Init",
            kind: error.kind(),
            message: error.to_string(),
        })?;
        Ok(Watchdog { _alive: alive })
    }
}

fn words(limit: Duration, version: &str, world: Option<World>) -> String {
    let (limit, who) = (
        limit.as_secs_f64(),
        world.map_or("this process".to_string(), |world| {
            format!("rank {} of {}", world.rank, world.size)
        }),
    );
    format!(
        "error: cannot set up the ranks: MPI_Init ({version}) has not returned on {who} after \
         {limit:.1} s: some rank has not called it\n  \
         ranks that say this have come; each of the others has ended, is stopped, is late, or \
         does not use MPI\n  \
         MPI_Init cannot be called back, so this process ends; MOESAIC_DEADLINE=SECONDS gives \
         late ranks more time"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_come_and_what_helps_is_said() {
        let words = words(LEAST, "MPICH Version: 5.0.2", World::new(0, 2).ok());
        for part in ["on rank 0 of 2 after 5.0 s", "MPICH", "MOESAIC_DEADLINE"] {
            assert!(words.contains(part), "{words}");
        }
    }

    /// The thread ends with the guard.
    #[test]
    fn what_has_returned_is_left_alone() {
        drop(Watchdog::begin(Duration::ZERO, "").unwrap());
    }
}
