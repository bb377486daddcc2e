//! Meeting of ranks in a folder that all of them see.
//!
//! Each rank writes its card there. Rank 0 waits for all cards and writes them together. A rank
//! that finds its own card of this run among them acknowledges that, and acknowledges again when
//! the file changes, because an old card of another rank may have been among them. When all ranks
//! have seen the same file, rank 0 marks it as done; each rank then removes its files, and rank 0
//! the rest. So files that an earlier run left under the same token are replaced and never
//! believed.

use super::{Guest, join, split};
use crate::error::MeetingError;
use crate::hash;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PAUSE: Duration = Duration::from_millis(10);

/// Returns the cards of all ranks.
pub(super) fn gather(guest: &mut Guest, folder: &Path) -> Result<Vec<Vec<u8>>, MeetingError> {
    let meeting = MeetingFolder {
        folder: folder.to_path_buf(),
        token: guest.token,
    };
    // The nonce marks the card of this run.
    let own = [&guest.nonce.to_le_bytes()[..], &guest.card].concat();
    meeting.write(&card_of(guest.rank), &own)?;
    let all = match guest.rank {
        0 => collect_cards(guest, &meeting),
        _ => receive_cards(guest, &meeting, &own),
    }?;
    let card = |card: Vec<u8>| card.get(8..).map(<[u8]>::to_vec);
    let cards: Option<Vec<Vec<u8>>> = all.into_iter().map(card).collect();
    cards.ok_or_else(|| MeetingError::Damaged {
        folder: folder.to_path_buf(),
    })
}

fn card_of(rank: usize) -> String {
    format!("rank-{rank}")
}

fn seen_by(rank: usize) -> String {
    format!("seen-{rank}")
}

const ALL: &str = "all";
/// The marker that all ranks have seen the cards.
const DONE: &str = "done";

/// Runs rank 0 until all ranks have seen the cards.
fn collect_cards(guest: &mut Guest, meeting: &MeetingFolder) -> Result<Vec<Vec<u8>>, MeetingError> {
    let mut written = Vec::new();
    loop {
        let cards: Vec<Option<Vec<u8>>> = (0..guest.size)
            .map(|rank| meeting.read(&card_of(rank)))
            .collect();
        let whole: Option<Vec<Vec<u8>>> = cards.iter().cloned().collect();
        if let Some(cards) = &whole {
            let bytes = join(cards);
            // Cards of an earlier run may have been replaced since the last look.
            if bytes != written {
                meeting.write(ALL, &bytes)?;
                written = bytes;
            }
        }
        // Acknowledgements carry a hash of what was seen, so one of an older file does not count.
        let sign = hash::of(&[&written]).to_le_bytes();
        let seen =
            |rank: usize| rank == 0 || meeting.read(&seen_by(rank)).is_some_and(|s| s == sign);
        if let Some(cards) = whole
            && (0..guest.size).all(seen)
        {
            meeting.write(DONE, &sign)?;
            wait_for_all(guest, meeting)?;
            return Ok(cards);
        }
        if guest.late() {
            let missing = guest.missing(|rank| cards[rank].is_some() && seen(rank));
            return Err(MeetingError::Missing {
                missing,
                size: guest.size,
                place: meeting.place(),
                waited: guest.waited(),
            });
        }
        guest.pause(PAUSE);
    }
}

/// Runs rank 0 until the others know that all have seen the same cards.
fn wait_for_all(guest: &mut Guest, meeting: &MeetingFolder) -> Result<(), MeetingError> {
    let gone = |rank: usize| rank == 0 || meeting.read(&seen_by(rank)).is_none();
    while !(0..guest.size).all(gone) {
        if guest.late() {
            let missing = guest.missing(gone);
            return Err(MeetingError::Stuck {
                missing,
                size: guest.size,
                place: meeting.place(),
                waited: guest.waited(),
            });
        }
        guest.pause(PAUSE);
    }
    // Files are removed only now: a rank that still reads them would wait until its deadline.
    meeting.clear(guest.size);
    Ok(())
}

fn receive_cards(
    guest: &mut Guest,
    meeting: &MeetingFolder,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, MeetingError> {
    let mut said = None;
    loop {
        if let Some(bytes) = meeting.read(ALL)
            && let Some(all) = split(&bytes, guest.size)
            // The nonce inside tells this run's card from one that an earlier run left.
            && all[guest.rank] == own
        {
            let sign = hash::of(&[&bytes]).to_le_bytes();
            // Acknowledge each version of the file once.
            if said.replace(sign) != Some(sign) {
                meeting.write(&seen_by(guest.rank), &sign)?;
            }
            if meeting.read(DONE).is_some_and(|done| done == sign) {
                meeting.leave(guest.rank);
                return Ok(all);
            }
        }
        if guest.late() {
            return Err(MeetingError::NothingLeft {
                rank: guest.rank,
                place: meeting.place(),
                waited: guest.waited(),
            });
        }
        guest.pause(PAUSE);
    }
}

/// The files of a job.
struct MeetingFolder {
    folder: PathBuf,
    token: u64,
}

impl MeetingFolder {
    fn place(&self) -> String {
        format!("`{}`", self.folder.display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder
            .join(format!("moesaic-{:016x}-{name}", self.token))
    }

    /// Writes a file atomically, by renaming it into place.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), MeetingError> {
        let path = self.path(name);
        // Readers never see a half-written file, because rename is atomic within a folder.
        let new = self.path(&format!("{name}.new{}", std::process::id()));
        let written = std::fs::write(&new, bytes).and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|error| MeetingError::Write {
            path,
            source: error.into(),
        })
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.path(name)).ok()
    }

    /// Removes a rank's files. A file that cannot be removed does no harm, except that rank 0
    /// waits for it.
    fn leave(&self, rank: usize) {
        let _ = std::fs::remove_file(self.path(&card_of(rank)));
        let _ = std::fs::remove_file(self.path(&seen_by(rank)));
    }

    fn clear(&self, size: usize) {
        (0..size).for_each(|rank| self.leave(rank));
        let _ = std::fs::remove_file(self.path(ALL));
        let _ = std::fs::remove_file(self.path(DONE));
    }
}
