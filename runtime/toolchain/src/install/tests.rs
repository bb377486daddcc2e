//! Installations from wheels made here, by a stand-in for pip that copies them.

use super::*;
use std::process::Command;

/// A cache directory of its own, and the wheel that pip hands out.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// Makes a place with a wheel of these files.
    fn with_wheel(files: &[(&str, &str)]) -> Place {
        let folder = tempfile::tempdir().unwrap();
        let script = "import sys, zipfile\n\
            with zipfile.ZipFile(sys.argv[1], 'w') as z:\n\
            \x20   for name, text in zip(sys.argv[2::2], sys.argv[3::2]): z.writestr(name, text)\n";
        let pairs = files.iter().flat_map(|(name, text)| [*name, *text]);
        let made = Command::new("python3")
            .args(["-c", script])
            .arg(folder.path().join("given.whl"))
            .args(pairs)
            .status();
        assert!(made.unwrap().success());
        Place { folder }
    }

    /// Makes a place with a wheel whose `zig` passes everything on to the real one.
    fn with_zig() -> Place {
        let mut real = Registry::open().unwrap();
        install(&mut real, &[ToolKind::Rocm], &mut |_| {})
            .unwrap_or_else(|error| panic!("{error}"));
        let zig = real.path(real.get(ToolKind::Rocm).unwrap());
        let script = format!("#!/bin/sh\nexec \"{}\" \"$@\"\n", zig.display());
        Place::with_wheel(&[
            ("ziglang/zig", &script),
            ("ziglang/lib/std.zig", "not needed"),
        ])
    }

    /// Returns a Python that copies the wheel and writes a line when asked to download.
    fn python(&self) -> Python {
        let path = self.folder.path().join("python.sh");
        let home = self.folder.path().display();
        let script = format!(
            "case \"$*\" in\n\
             *'pip --version'*) ;;\n\
             *'pip download'*) while [ \"$1\" != --dest ]; do shift; done\n\
             echo fetched >> '{home}/log'; cp '{home}/given.whl' \"$2/given.whl\";;\n\
             *) exec python3 \"$@\";;\nesac\n"
        );
        std::fs::write(&path, script).unwrap();
        Python::shell(&path)
    }

    fn registry(&self) -> Registry {
        Registry::at(self.folder.path())
    }

    fn install(&self, kinds: &[ToolKind]) -> Result<Vec<String>, ToolchainError> {
        let mut steps = Vec::new();
        let mut registry = self.registry();
        let mut progress = |step: &InstallStep| match step {
            // They depend on time; `bytes_of_a_download_are_counted` looks at them.
            InstallStep::Received { .. } => {}
            step => steps.push(step.to_string()),
        };
        let python = self.python();
        Installer {
            registry: &mut registry,
            python,
            progress: &mut progress,
        }
        .install(kinds)?;
        Ok(steps)
    }

    fn downloads(&self) -> usize {
        let log = std::fs::read_to_string(self.folder.path().join("log"));
        log.unwrap_or_default().lines().count()
    }

    /// Returns the names below `toolchain/` except the lock.
    fn left(&self) -> Vec<String> {
        let names = entries(self.registry().folder()).into_iter();
        let mut names = names
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .filter(|name| name != "lock")
            .collect::<Vec<_>>();
        names.sort();
        names
    }
}

#[test]
fn bytes_of_a_download_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("python.sh");
    // The first bytes lie in a folder of pip's own.
    let text = "case \"$*\" in *'pip --version'*) exit 0;; esac\n\
        while [ \"$1\" != --dest ]; do shift; done\n\
        mkdir \"$TMPDIR/part\"; printf 12345 > \"$TMPDIR/part/a\"; sleep 1\n\
        mv \"$TMPDIR/part/a\" \"$2/a.whl\"; printf 678 >> \"$2/a.whl\"; sleep 1\n";
    std::fs::write(&script, text).unwrap();
    let wheels = folder.path().join("wheels");
    std::fs::create_dir(&wheels).unwrap();
    let mut seen = Vec::new();
    let mut received = |bytes| seen.push(bytes);
    let wheel = Python::shell(&script).download(ToolKind::C, &wheels, &mut received);
    assert_eq!(wheel.unwrap(), wheels.join("a.whl"));
    assert_eq!(seen.first(), Some(&5), "{seen:?}");
    assert_eq!(seen.last(), Some(&8), "{seen:?}");
}

#[test]
fn one_wheel_serves_two_kinds() {
    let place = Place::with_zig();
    let steps = place.install(&[ToolKind::Rocm, ToolKind::C]).unwrap();
    let expected = [
        "downloading ziglang==0.17.0",
        "unpacking ziglang==0.17.0",
        "rocm: compiling a test kernel",
        "rocm: clang 22.1.8 installed",
        "c: compiling a test kernel",
    ];
    assert_eq!(steps[..5], expected);
    assert!(
        steps[5].starts_with("c: ") && steps[5].ends_with(" installed"),
        "{steps:?}"
    );
    assert_eq!(place.left(), ["registry.json", "ziglang-0.17.0"]);
    assert_eq!(place.downloads(), 1);
    let again = place.install(&[ToolKind::C]).unwrap();
    assert!(again[0].ends_with(" is installed"), "{again:?}");
}

#[test]
fn two_installations_at_once_download_once() {
    let place = Place::with_zig();
    let python = place.python();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (python, mut registry) = (python.clone(), place.registry());
            scope.spawn(move || {
                let mut installer = Installer {
                    registry: &mut registry,
                    python,
                    progress: &mut |_| {},
                };
                installer.install(&[ToolKind::Rocm]).unwrap();
            });
        }
    });
    assert_eq!(place.downloads(), 1);
    assert_eq!(place.registry().list().len(), 1);
}

#[test]
fn a_damaged_folder_is_replaced() {
    let place = Place::with_zig();
    let folder = place.registry().folder().join("ziglang-0.17.0");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("zig"), "half of a zi").unwrap();
    let killed = place.registry().folder().join("installing-x");
    std::fs::create_dir(killed).unwrap();
    place.install(&[ToolKind::Rocm]).unwrap();
    assert_eq!(place.downloads(), 1);
    assert_eq!(place.left(), ["registry.json", "ziglang-0.17.0"]);
}

#[test]
fn a_compiler_that_does_not_work_leaves_nothing() {
    let place = Place::with_wheel(&[("nvidia/cu13/lib/libnvrtc.so.13", "no library")]);
    let error = place.install(&[ToolKind::Cuda]).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "`nvidia-cuda-nvrtc==13.0.88` was fetched and does not work on this machine: "
        ),
        "{error}"
    );
    assert_eq!(place.left(), Vec::<String>::new());
}

#[test]
fn a_wheel_without_the_compiler_is_named() {
    let place = Place::with_wheel(&[("other/file", "")]);
    let error = place.install(&[ToolKind::C]).unwrap_err().to_string();
    assert_eq!(
        error,
        "the wheel of `ziglang==0.17.0` cannot be unpacked: it holds no file `zig`"
    );
    assert_eq!(place.left(), Vec::<String>::new());
}
