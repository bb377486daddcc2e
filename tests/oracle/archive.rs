//! Fixtures of the oracles, which lie in one archive for each folder.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Error, ErrorKind, Result};
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

/// Size of the records of a tar file (POSIX.1-1988, `ustar`).
const RECORD: usize = 512;

/// Returns a folder with the fixtures of `tests/oracle/{name}.tar`.
///
/// The first test that needs an archive unpacks it beside the running program.
#[allow(dead_code, reason = "`xtask` unpacks where it likes")]
pub fn folder(name: &str) -> PathBuf {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|broken| broken.into_inner());
    unpacked(name).unwrap_or_else(|error| panic!("tests/oracle/{name}.tar: {error}"))
}

fn unpacked(name: &str) -> Result<PathBuf> {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let oracle = above
        .find_map(|root| Some(root.join("tests/oracle")).filter(|path| path.is_dir()))
        .ok_or_else(|| Error::other("there is no folder tests/oracle"))?;
    let archive = fs::read(oracle.join(name).with_extension("tar"))?;
    let mut hasher = DefaultHasher::new();
    archive.hash(&mut hasher);
    let program = std::env::current_exe()?;
    let place = format!("oracle-{:016x}", hasher.finish());
    let place = program.with_file_name(place);
    if !place.exists() {
        // Another process may unpack the same archive now. Each renames a whole folder, so no
        // test sees half of one.
        let own = place.with_extension(std::process::id().to_string());
        unpack(&archive, &own.join(name))?;
        if let Err(error) = fs::rename(&own, &place) {
            fs::remove_dir_all(&own)?;
            if !place.exists() {
                return Err(error);
            }
        }
    }
    Ok(place.join(name))
}

/// Writes the files of a tar archive below `folder`.
///
/// # Errors
///
/// `InvalidData` if the archive is cut short, names a file outside `folder`, or holds anything
/// but plain files; the errors of writing.
pub fn unpack(archive: &[u8], folder: &Path) -> Result<()> {
    let broken = |what: &str| Error::new(ErrorKind::InvalidData, what.to_string());
    let mut rest = archive;
    loop {
        let (header, after) = rest.split_at_checked(RECORD).ok_or(broken("cut short"))?;
        // A record of zeros ends the archive.
        if header[0] == 0 {
            return Ok(());
        }
        let text = |field: &[u8]| -> Option<String> {
            let text = field.split(|byte| *byte == 0).next()?;
            Some(std::str::from_utf8(text).ok()?.trim().to_string())
        };
        let name = text(&header[..100]).ok_or(broken("a name is no UTF-8"))?;
        let octal = text(&header[124..136]).ok_or(broken("a size is no number"))?;
        let size = usize::from_str_radix(&octal, 8).map_err(|_| broken("a size is no number"))?;
        let path = Path::new(&name);
        let inside = path.components().all(|c| matches!(c, Component::Normal(_)));
        // Byte 156 is the kind of entry, from byte 345 on stands a prefix of long names.
        if !inside || header[156] != b'0' || header[345] != 0 {
            return Err(broken(&format!(
                "{name:?} is no plain file with a short name"
            )));
        }
        let (bytes, after) = after.split_at_checked(size).ok_or(broken("cut short"))?;
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(path, bytes)?;
        let padding = size.next_multiple_of(RECORD) - size;
        rest = after.get(padding..).ok_or(broken("cut short"))?;
    }
}
