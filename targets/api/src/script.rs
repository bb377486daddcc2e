//! Compilers behind scripts, which may add flags of their own, and behind other launchers.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The longest script that is read, in bytes.
const LONGEST: u64 = 1 << 20;

/// Returns a word for the texts of the scripts among `program` and the programs that `args` name,
/// as in `ccache mycc`; none if all of them are binaries. A script that runs `gcc -ffast-math`
/// tells gcc's version, so a fingerprint needs its text, too. The word has no path and no time: the
/// same script on another machine gives the same word, and a binary adds nothing to a fingerprint.
pub fn scripts(program: &Path, args: &[String]) -> Option<String> {
    let named = args.iter().filter_map(|arg| on_path(Path::new(arg)));
    let texts: Vec<Vec<u8>> = std::iter::once(program.to_path_buf())
        .chain(named)
        .filter_map(|program| text(&program))
        .collect();
    if texts.is_empty() {
        return None;
    }
    Some(format!("script {:016x}", hash(&texts.concat())))
}

/// Programs that are called by a compiler's name, through a link, and start the compiler of that
/// name: `/usr/lib/ccache/gcc` is a link to ccache.
const LAUNCHERS: [&str; 4] = ["ccache", "sccache", "distcc", "icecc"];

/// Returns true if `program` is a link to a launcher, whose file does not change along with the
/// compiler behind it.
pub fn is_link_to_launcher(program: &Path) -> bool {
    let file = program.canonicalize().ok();
    let name = file.as_deref().and_then(Path::file_stem);
    LAUNCHERS
        .iter()
        .any(|launcher| name.is_some_and(|name| name == *launcher))
}

/// Returns the file that a launcher starts for the word `name`.
fn on_path(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return Some(name.to_path_buf());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Returns the program's bytes if it is a script.
fn text(program: &Path) -> Option<Vec<u8>> {
    let mut file = File::open(program).ok()?;
    let mut text = vec![0; 2];
    file.read_exact(&mut text).ok()?;
    if text != b"#!" {
        return None;
    }
    file.take(LONGEST).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Computes a number that distinguishes texts in a fingerprint: FNV-1a.
pub fn hash(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_known_by_its_text_and_a_binary_by_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let plain = file("cc", "#!/bin/sh\nexec gcc \"$@\"\n");
        let same = file("other", "#!/bin/sh\nexec gcc \"$@\"\n");
        let fast = file("fast", "#!/bin/sh\nexec gcc -ffast-math \"$@\"\n");
        let binary = file("gcc", "\x7fELF");
        assert_eq!(scripts(&plain, &[]), scripts(&same, &[]));
        assert_ne!(scripts(&plain, &[]), scripts(&fast, &[]));
        assert_eq!(scripts(&binary, &["-O2".to_string()]), None);
        let behind = scripts(&binary, &[fast.display().to_string()]);
        assert_eq!(behind, scripts(&fast, &[]));
        assert_eq!(scripts(&folder.path().join("gone"), &[]), None);
    }
}
