//! Damaged files, and disks that refuse writes.

use crate::common::{artifact, kernel_path, key, request, source, stored};
use moesaic_cache::{KernelOrigin, OnBad, PruneRule, Store};
use std::fs;
use std::path::Path;

const BYTES: usize = 3000;

/// Returns a store with one kernel, and the kernel's file.
fn one(dir: &Path) -> (Store, Vec<u8>) {
    let store = Store::open(dir);
    let source = source("dispatch");
    store
        .put(&key(&source), &source, &stored(&source, BYTES))
        .unwrap();
    let bytes = fs::read(kernel_path(dir, &key(&source))).unwrap();
    (store, bytes)
}

fn is_miss(store: &Store, bytes: &[u8]) -> bool {
    let key = key(&source("dispatch"));
    fs::write(kernel_path(store.dir(), &key), bytes).unwrap();
    store.get(&key).is_none()
}

#[test]
fn every_truncation_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    let lengths = (0..300)
        .chain((300..bytes.len()).step_by(97))
        .chain([bytes.len() - 1]);
    for length in lengths {
        assert!(
            is_miss(&store, &bytes[..length]),
            "{length} bytes were taken for a kernel"
        );
    }
    assert!(
        is_miss(&store, &[&bytes[..], b"x"].concat()),
        "a longer file"
    );
    assert!(!is_miss(&store, &bytes), "the whole file");
}

#[test]
fn every_flipped_bit_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    for at in (0..300).chain((300..bytes.len()).step_by(53)) {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(is_miss(&store, &bad), "byte {at}");
    }
    assert_eq!(store.stats().misses, store.stats().damaged);
}

#[test]
fn lengths_that_overflow_are_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    for (at, width) in [(12, 4), (16, 8)] {
        let mut bad = bytes.clone();
        bad[at..at + width].fill(0xff);
        assert!(is_miss(&store, &bad));
    }
}

#[test]
fn a_kernel_under_another_key_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    let other = key(&source("other"));
    let path = kernel_path(dir.path(), &other);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
    assert!(store.get(&other).is_none());
}

#[test]
fn a_damaged_kernel_is_compiled_again_and_healed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    assert!(is_miss(&store, &bytes[..100]));
    assert_eq!(
        store.verify(OnBad::Report).bad[0].reason,
        "it has 100 bytes and declares others"
    );
    let source = source("dispatch");
    let compile = || Ok(artifact("dispatch", BYTES));
    assert_eq!(
        store
            .get_or_compile(&request(&source), compile)
            .unwrap()
            .origin,
        KernelOrigin::Compiled
    );
    assert_eq!(
        store
            .get_or_compile(&request(&source), compile)
            .unwrap()
            .origin,
        KernelOrigin::Store
    );
    assert_eq!(store.verify(OnBad::Report).good, 1);
}

#[test]
fn verify_removes_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes) = one(dir.path());
    is_miss(&store, &bytes[..bytes.len() - 1]);
    assert!(!store.verify(OnBad::Report).bad[0].removed);
    assert!(store.verify(OnBad::Remove).bad[0].removed);
    assert_eq!(store.verify(OnBad::Report), Default::default());
}

/// People read the source beside a kernel, so another text there is reported; the kernel runs.
#[test]
fn a_source_of_another_kernel_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = one(dir.path());
    let key = key(&source("dispatch"));
    let path = kernel_path(dir.path(), &key).with_extension("c");
    let whole = fs::read(&path).unwrap();
    for text in [&whole[..whole.len() - 1], b"int other;", b"\xff"] {
        fs::write(&path, text).unwrap();
        let verified = store.verify(OnBad::Report);
        assert_eq!((verified.good, verified.bad), (1, vec![]));
        assert_eq!(verified.bad_sources[0].path, path);
        assert!(verified.bad_sources[0].reason.contains("not the text"));
        assert!(store.get(&key).is_some() && store.source(&key).is_none());
    }
    assert!(store.verify(OnBad::Remove).bad_sources[0].removed);
    let verified = store.verify(OnBad::Report);
    assert_eq!((verified.good, verified.bad_sources), (1, vec![]));
}

#[test]
fn a_store_that_can_hold_nothing_is_of_no_use() {
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("not/there");
    assert!(Store::open(&new).check_use().is_ok() && new.is_dir());
    let file = tempfile::NamedTempFile::new().unwrap();
    for place in [file.path(), &file.path().join("below")] {
        let error = Store::open(place).check_use().unwrap_err().to_string();
        assert!(error.contains(&place.display().to_string()), "{error}");
    }
}

/// Checks that a fetch from a store that cannot write works, reports the failure, and counts it.
fn works_without(store: &Store, words: &str) {
    let source = source("dispatch");
    let fetched = store.get_or_compile(&request(&source), || Ok(artifact("dispatch", BYTES)));
    let fetched = fetched.unwrap();
    assert_eq!(fetched.stored.artifact, artifact("dispatch", BYTES));
    let trouble = fetched
        .trouble
        .expect("the store reports nothing")
        .to_string();
    assert!(trouble.contains(words), "{trouble}");
    assert!(store.stats().failures > 0);
    assert_eq!(store.verify(OnBad::Report).good + store.list().len(), 0);
}

/// Checks that such a store cannot remember facts either.
fn forgets(store: &Store) {
    assert!(store.remember("fact", &1).is_err());
    assert_eq!(store.fact::<u32>("fact"), None);
}

#[test]
fn a_cache_below_a_file_fails_softly() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let store = Store::open(file.join("cache"));
    works_without(&store, "cannot make");
    forgets(&store);
}

/// In /proc even root cannot write.
#[cfg(target_os = "linux")]
#[test]
fn a_read_only_place_fails_softly() {
    let store = Store::open("/proc/self/task");
    works_without(&store, "cannot make");
    forgets(&store);
}

#[test]
fn a_directory_in_the_place_of_a_kernel_fails_softly() {
    let dir = tempfile::tempdir().unwrap();
    let source = source("dispatch");
    fs::create_dir_all(kernel_path(dir.path(), &key(&source)).join("x")).unwrap();
    works_without(&Store::open(dir.path()), "cannot write");
}

#[test]
fn a_directory_under_a_kernels_name_is_found_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = one(dir.path());
    let path = kernel_path(dir.path(), &key(&source("dispatch")));
    fs::remove_file(&path).unwrap();
    fs::create_dir_all(path.join("inside")).unwrap();
    assert_eq!(store.verify(OnBad::Report).bad.len(), 1);
    let verified = store.verify(OnBad::Remove);
    assert!(verified.bad[0].removed && !path.exists());
    assert!(store.verify(OnBad::Report).bad.is_empty());
}

#[test]
fn a_file_is_no_store() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let trouble = Store::open(file.path()).trouble().unwrap().to_string();
    assert!(trouble.contains("is not a directory"), "{trouble}");
    if cfg!(unix) {
        let trouble = Store::open("/dev/null").trouble().unwrap().to_string();
        assert!(
            trouble.contains("/dev/null is not a directory"),
            "{trouble}"
        );
        assert!(!trouble.contains("chmod"), "{trouble}");
    }
}

/// A user who may read a store, and not write to it, hears that its kernels stay.
#[cfg(target_os = "linux")]
#[test]
fn kernels_that_cannot_be_removed_are_counted() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    allow(dir.path(), 0o755);
    let (store, _) = one(dir.path());
    let path = kernel_path(dir.path(), &key(&source("dispatch")));
    allow(path.parent().unwrap(), 0o555);
    let rule = PruneRule {
        max_bytes: Some(0),
        max_age: None,
    };
    let another = || {
        // SAFETY: it changes whose files this thread may write; root could write to any.
        unsafe { libc::setfsuid(65534) };
        store.prune(&rule)
    };
    let pruned = std::thread::scope(|scope| scope.spawn(another).join()).unwrap();
    assert_eq!((pruned.removed, pruned.stuck, pruned.kept), (0, 1, 0));
    allow(path.parent().unwrap(), 0o755);
    let pruned = store.prune(&rule);
    assert_eq!((pruned.removed, pruned.stuck, pruned.kept), (1, 0, 0));
}
