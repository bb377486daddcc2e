//! Ranks meet in a folder that all of them see.
//!
//! Each rank leaves its card there. Rank 0 waits for all, and leaves them together; a rank
//! that finds its own card of this run among them says so, and says it again when they
//! change: an old card of another rank may have been among them. When all have seen the
//! same, rank 0 says that it is done; each rank then takes its files away, and rank 0 the
//! rest. So files that an earlier run with the same token has left are replaced, and never
//! believed.

use super::{Guest, cut, join};
use crate::hash;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PAUSE: Duration = Duration::from_millis(10);

/// Everybody's card.
pub fn gather(guest: &mut Guest, folder: &Path) -> Result<Vec<Vec<u8>>, String> {
    let place = Place {
        folder: folder.to_path_buf(),
        token: guest.token,
    };
    // The card of this run, and no other.
    let own = [&guest.nonce.to_le_bytes()[..], &guest.card].concat();
    place.write(&card_of(guest.rank), &own)?;
    let all = match guest.rank {
        0 => receive_all(guest, &place),
        _ => take_all(guest, &place, &own),
    }?;
    let card = |card: Vec<u8>| card.get(8..).map(<[u8]>::to_vec);
    let cards: Option<Vec<Vec<u8>>> = all.into_iter().map(card).collect();
    cards.ok_or_else(|| format!("a file in `{}` is damaged", folder.display()))
}

fn card_of(rank: usize) -> String {
    format!("rank-{rank}")
}

fn seen_by(rank: usize) -> String {
    format!("seen-{rank}")
}

const ALL: &str = "all";
/// What all have seen.
const DONE: &str = "done";

/// Rank 0: until all have seen the cards that are there.
fn receive_all(guest: &mut Guest, place: &Place) -> Result<Vec<Vec<u8>>, String> {
    let mut written = Vec::new();
    loop {
        let cards: Vec<Option<Vec<u8>>> = (0..guest.size)
            .map(|rank| place.read(&card_of(rank)))
            .collect();
        let whole: Option<Vec<Vec<u8>>> = cards.iter().cloned().collect();
        if let Some(cards) = &whole {
            let bytes = join(cards);
            if bytes != written {
                place.write(ALL, &bytes)?;
                written = bytes;
            }
        }
        let sign = hash::of(&[&written]).to_le_bytes();
        let seen = |rank: usize| rank == 0 || place.read(&seen_by(rank)).is_some_and(|s| s == sign);
        if let Some(cards) = whole
            && (0..guest.size).all(seen)
        {
            place.write(DONE, &sign)?;
            wait_for_all(guest, place)?;
            return Ok(cards);
        }
        if guest.late() {
            let missing = guest.missing(|rank| cards[rank].is_some() && seen(rank));
            return Err(format!(
                "{missing} of {} did not come to `{}` within {:.1} s",
                guest.size,
                place.folder.display(),
                guest.waited()
            ));
        }
        guest.pause(PAUSE);
    }
}

/// Rank 0: until the others know that all have seen the same.
fn wait_for_all(guest: &mut Guest, place: &Place) -> Result<(), String> {
    let gone = |rank: usize| rank == 0 || place.read(&seen_by(rank)).is_none();
    while !(0..guest.size).all(gone) {
        if guest.late() {
            let missing = guest.missing(gone);
            return Err(format!(
                "{missing} of {} came to `{}` and did not go on within {:.1} s",
                guest.size,
                place.folder.display(),
                guest.waited()
            ));
        }
        guest.pause(PAUSE);
    }
    place.clear(guest.size);
    Ok(())
}

fn take_all(guest: &mut Guest, place: &Place, own: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut said = None;
    loop {
        if let Some(bytes) = place.read(ALL)
            && let Some(all) = cut(&bytes, guest.size)
            && all[guest.rank] == own
        {
            let sign = hash::of(&[&bytes]).to_le_bytes();
            if said.replace(sign) != Some(sign) {
                place.write(&seen_by(guest.rank), &sign)?;
            }
            if place.read(DONE).is_some_and(|done| done == sign) {
                place.leave(guest.rank);
                return Ok(all);
            }
        }
        if guest.late() {
            return Err(format!(
                "rank 0 has left nothing for rank {} in `{}` within {:.1} s; all ranks must see \
                 the same folder",
                guest.rank,
                place.folder.display(),
                guest.waited()
            ));
        }
        guest.pause(PAUSE);
    }
}

/// The files of a job.
struct Place {
    folder: PathBuf,
    token: u64,
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.folder
            .join(format!("moesaic-{:016x}-{name}", self.token))
    }

    /// The whole file at once, by its name.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let path = self.path(name);
        let new = self.path(&format!("{name}.new{}", std::process::id()));
        let words = |error: std::io::Error| format!("cannot write `{}`: {error}", path.display());
        std::fs::write(&new, bytes).map_err(words)?;
        std::fs::rename(&new, &path).map_err(words)
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.path(name)).ok()
    }

    /// What cannot be removed does no harm, but that rank 0 waits for it.
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
