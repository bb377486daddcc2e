//! The threads of all devices that have none of their own.

use crate::team::Team;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// One team for the process, while a device uses it: its threads end with the
/// last such device. Devices do not meet otherwise, and results do not depend on
/// threads.
static TEAM: Mutex<Weak<Team>> = Mutex::new(Weak::new());

/// A device's part in the team; the first run starts the threads.
pub(crate) struct Shared {
    threads: usize,
    team: OnceLock<Arc<Team>>,
}

impl Shared {
    /// As many threads as this process may use processors, a caller included.
    pub(crate) fn new() -> Shared {
        Shared {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            team: OnceLock::new(),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn team(&self) -> &Team {
        self.team.get_or_init(|| current(&TEAM, self.threads - 1))
    }
}

/// The team there is, or a new one.
fn current(known: &Mutex<Weak<Team>>, workers: usize) -> Arc<Team> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    known.upgrade().unwrap_or_else(|| {
        let team = Arc::new(Team::up_to(workers));
        *known = Arc::downgrade(&team);
        team
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_team_is_shared_and_ends_with_its_last_user() {
        let known = Mutex::new(Weak::new());
        let (first, second) = (current(&known, 1), current(&known, 3));
        assert!(Arc::ptr_eq(&first, &second));
        let weak = Arc::downgrade(&first);
        drop((first, second));
        assert!(weak.upgrade().is_none());
        assert_eq!(current(&known, 3).workers(), 3);
    }

    #[test]
    fn devices_have_the_same_team() {
        let (first, second) = (Shared::new(), Shared::new());
        assert!(std::ptr::eq(first.team(), second.team()));
        assert_eq!(first.team().workers() + 1, first.threads());
    }
}
