//! Finds NVRTC.

use super::table::Nvrtc;
use moesaic_dl::{Attempt, DlError, Library};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names that the system's loader is asked for, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Folders of a CUDA installation that hold its libraries.
const FOLDERS: [&str; 3] = ["lib64", "lib", "targets/x86_64-linux/lib"];

/// A place to look for NVRTC, in the order in which the user expects it to win.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvrtcPlace {
    /// A library file, or a folder with one.
    Path(PathBuf),
    /// A name for the system's loader.
    Name(String),
}

/// Returns every place to look. A set `MOESAIC_NVRTC` is binding, so nothing
/// else is tried then. Otherwise the order is the toolchain registry, an
/// installation named by the usual variables, and the system's loader.
pub fn places(
    registered: Option<&Path>,
    var: impl Fn(&str) -> Option<OsString>,
) -> Vec<NvrtcPlace> {
    let set = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(path) = set("MOESAIC_NVRTC") {
        return vec![NvrtcPlace::Path(path)];
    }
    let installations = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set);
    let folders = installations.flat_map(|root| FOLDERS.map(|folder| root.join(folder)));
    registered
        .map(Path::to_path_buf)
        .into_iter()
        .chain(folders)
        .map(NvrtcPlace::Path)
        .chain(NAMES.map(|name| NvrtcPlace::Name(name.to_string())))
        .collect()
}

/// Opens the first place that holds a working NVRTC; an error lists the answer
/// of each place.
pub fn open_first(places: &[NvrtcPlace]) -> Result<Nvrtc, Vec<Attempt>> {
    let mut attempts = Vec::new();
    for place in places {
        match open(place) {
            Ok(nvrtc) => return Ok(nvrtc),
            Err(attempt) => attempts.push(attempt),
        }
    }
    Err(attempts)
}

fn open(place: &NvrtcPlace) -> Result<Nvrtc, Attempt> {
    match place {
        NvrtcPlace::Name(name) => finish(name, Library::open("NVRTC", &[name])),
        NvrtcPlace::Path(path) => open_path(path),
    }
}

fn open_path(path: &Path) -> Result<Nvrtc, Attempt> {
    let name = path.display().to_string();
    let refuse = |reason: &str| Attempt {
        name: name.clone(),
        reason: reason.to_string(),
    };
    let file = if path.is_dir() {
        newest(path, "libnvrtc.so").ok_or_else(|| refuse("no libnvrtc.so in this folder"))?
    } else if path.exists() {
        path.to_path_buf()
    } else {
        return Err(refuse("no such file or folder"));
    };
    preload_builtins(&file).map_err(|error| refuse(&error.to_string()))?;
    finish(&name, Library::open_path("NVRTC", &file))
}

/// Loads the builtins library, which NVRTC opens by name at the first compile.
/// Releases without a run path do not find it beside themselves; once it is
/// loaded, the loader answers from memory.
fn preload_builtins(nvrtc: &Path) -> Result<(), DlError> {
    let folder = nvrtc.parent().unwrap_or(Path::new("."));
    if let Some(builtins) = newest(folder, "libnvrtc-builtins.so") {
        Library::open_path("the NVRTC builtins", &builtins)?.keep_loaded();
    }
    Ok(())
}

/// Returns the file of `folder` that starts with `stem` and has the highest
/// name.
fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(stem))
        })
        .max()
}

fn finish(name: &str, library: Result<Library, DlError>) -> Result<Nvrtc, Attempt> {
    let refuse = |reason: String| Attempt {
        name: name.to_string(),
        reason,
    };
    let library = library.map_err(|error| refuse(loader_words(error)))?;
    let nvrtc = Nvrtc::load(library).map_err(|error| refuse(error.to_string()))?;
    let version = nvrtc.version();
    version.map_err(|error| refuse(error.to_string()))?;
    Ok(nvrtc)
}

fn loader_words(error: DlError) -> String {
    match error {
        DlError::NotFound { mut attempts, .. } if attempts.len() == 1 => attempts.remove(0).reason,
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(places: &[NvrtcPlace]) -> Vec<String> {
        let text = |place: &NvrtcPlace| match place {
            NvrtcPlace::Path(path) => path.display().to_string(),
            NvrtcPlace::Name(name) => name.clone(),
        };
        places.iter().map(text).collect()
    }

    #[test]
    fn the_registry_comes_before_installations_before_the_loader() {
        let var = |name: &str| (name == "CUDA_HOME").then(|| OsString::from("/opt/cuda"));
        let places = places(Some(Path::new("/cache/nvrtc")), var);
        let expected = [
            "/cache/nvrtc",
            "/opt/cuda/lib64",
            "/opt/cuda/lib",
            "/opt/cuda/targets/x86_64-linux/lib",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "libnvrtc.so",
        ];
        assert_eq!(paths(&places), expected);
    }

    #[test]
    fn the_variable_is_an_order() {
        let var = |name: &str| (name == "MOESAIC_NVRTC").then(|| OsString::from("/mine"));
        assert_eq!(
            paths(&places(Some(Path::new("/cache/nvrtc")), var)),
            ["/mine"]
        );
    }

    #[test]
    fn every_place_says_why_it_was_refused() {
        let folder = tempfile::tempdir().unwrap();
        let places = [
            NvrtcPlace::Path(PathBuf::from("/no/such/place")),
            NvrtcPlace::Path(folder.path().to_path_buf()),
            NvrtcPlace::Name("libmoesaic_no_nvrtc.so".to_string()),
        ];
        let Err(attempts) = open_first(&places) else {
            panic!("opened an empty folder")
        };
        let reasons = attempts
            .iter()
            .map(|attempt| attempt.reason.as_str())
            .collect::<Vec<_>>();
        assert_eq!(reasons[0], "no such file or folder");
        assert_eq!(reasons[1], "no libnvrtc.so in this folder");
        assert!(
            reasons[2].contains("cannot open shared object file"),
            "{}",
            reasons[2]
        );
    }
}
