//! The store's hits, misses, counters and refusals.

use crate::common::{artifact, files, kernel_path, key, request, source, stored};
use moesaic_cache::{FetchError, KernelOrigin, OnBad, PruneRule, Store};
use moesaic_target::{CompileError, CompilerReason, SharedError};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

#[test]
fn what_is_put_is_got() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("not/there/yet"));
    for bytes in [0, 1, 40_000] {
        let source = source(&format!("dispatch_{bytes}"));
        let (key, stored) = (key(&source), stored(&source, bytes));
        assert_eq!(store.get(&key), None);
        store.put(&key, &source, &stored).unwrap();
        assert_eq!(store.get(&key), Some(stored));
        assert_eq!(store.source(&key), Some(source.text));
    }
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.damaged), (3, 3, 0));
    assert!(stats.bytes_written > 40_001 && stats.bytes_read > stats.bytes_written);
}

#[test]
fn only_this_user_can_enter() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("cache");
    let store = Store::open(&root);
    let source = source("dispatch");
    store
        .put(&key(&source), &source, &stored(&source, 10))
        .unwrap();
    for dir in [
        &root,
        &root.join("v1"),
        kernel_path(&root, &key(&source)).parent().unwrap(),
    ] {
        assert_eq!(
            dir.metadata().unwrap().permissions().mode() & 0o777,
            0o700,
            "{dir:?}"
        );
    }
}

#[test]
fn who_may_read_the_directory_may_read_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o775)).unwrap();
    let source = source("dispatch");
    Store::open(dir.path())
        .put(&key(&source), &source, &stored(&source, 10))
        .unwrap();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let kernel = kernel_path(dir.path(), &key(&source));
    // The umask also removes permissions, so compare with a file and a folder made here.
    let [file, folder] = ["file", "folder"].map(|name| dir.path().join(name));
    fs::write(&file, "").unwrap();
    fs::create_dir(&folder).unwrap();
    assert_eq!(mode(&kernel), 0o644 & mode(&file));
    assert_eq!(mode(kernel.parent().unwrap()), 0o755 & mode(&folder));
}

#[test]
fn a_directory_that_everybody_can_write_to_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let source = source("dispatch");
    Store::open(dir.path())
        .put(&key(&source), &source, &stored(&source, 10))
        .unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let store = Store::open(dir.path());
    assert!(store.get(&key(&source)).is_none());
    let trouble = store.trouble().unwrap().to_string();
    assert!(
        trouble.contains("everybody can write") && trouble.contains("chmod go-w"),
        "{trouble}"
    );
    let fetched = store
        .get_or_compile(&request(&source), || Ok(artifact("dispatch", 10)))
        .unwrap();
    assert_eq!(fetched.origin, KernelOrigin::Compiled);
    assert!(fetched.trouble.is_some());
}

#[test]
fn a_source_that_was_edited_is_not_shown_as_the_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let source = source("dispatch");
    let key = key(&source);
    store.put(&key, &source, &stored(&source, 10)).unwrap();
    fs::write(kernel_path(dir.path(), &key).with_extension("c"), "edited").unwrap();
    assert_eq!(store.source(&key), None);
    assert!(store.get(&key).is_some());
}

#[test]
fn threads_that_ask_for_one_kernel_compile_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let (source, compiles, start) = (source("dispatch"), AtomicUsize::new(0), Barrier::new(24));
    let compile = || {
        compiles.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(30));
        Ok(artifact("dispatch", 1000))
    };
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                start.wait();
                let fetched = store.get_or_compile(&request(&source), compile).unwrap();
                assert_eq!(fetched.stored.artifact, artifact("dispatch", 1000));
            });
        }
    });
    assert_eq!(compiles.into_inner(), 1);
    assert_eq!(store.stats().compiles, 1);
    let again = store
        .get_or_compile(&request(&source), || panic!("compiled again"))
        .unwrap();
    assert_eq!(again.origin, KernelOrigin::Store);
}

#[test]
fn a_compile_error_reaches_every_thread_and_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let (source, start) = (source("dispatch"), Barrier::new(4));
    let fail = || {
        std::thread::sleep(Duration::from_millis(30));
        let (compiler, kernel) = ("gcc".to_string(), "dispatch".to_string());
        Err(CompileError::Failed {
            compiler,
            kernel,
            reason: CompilerReason::Other(SharedError::new(std::io::Error::other("boom"))),
        })
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                let error = store.get_or_compile(&request(&source), fail).unwrap_err();
                assert_eq!(error.to_string(), "gcc failed on kernel `dispatch`: boom");
            });
        }
    });
    let fetched = store
        .get_or_compile(&request(&source), || Ok(artifact("dispatch", 5)))
        .unwrap();
    assert_eq!(fetched.origin, KernelOrigin::Compiled);
}

#[test]
fn a_compile_that_panics_leaves_the_store_usable() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let source = source("dispatch");
    let panic = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                store
                    .get_or_compile(&request(&source), || panic!("on purpose"))
                    .is_ok()
            })
            .join()
    });
    assert!(panic.is_err());
    let fetched = store
        .get_or_compile(&request(&source), || Ok(artifact("dispatch", 5)))
        .unwrap();
    assert_eq!(
        (fetched.origin, fetched.trouble.is_none()),
        (KernelOrigin::Compiled, true)
    );
}

#[test]
fn a_lock_that_is_never_released_only_delays() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).patience(Duration::from_millis(50));
    let source = source("dispatch");
    let locks = dir.path().join("v1/locks");
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join(format!("{}.lock", key(&source)))).unwrap();
    lock.lock().unwrap();
    let fetched = store
        .get_or_compile(&request(&source), || Ok(artifact("dispatch", 5)))
        .unwrap();
    assert_eq!(fetched.origin, KernelOrigin::Compiled);
    assert!(store.get(&key(&source)).is_some());
}

#[test]
fn strict_mode_names_kernel_target_and_command() {
    let store = Store::open("/no/such/cache").strict();
    let source = source("grouped_gemm_up");
    let error = store
        .get_or_compile(&request(&source), || panic!("compiled"))
        .unwrap_err();
    assert!(matches!(error, FetchError::Missing { .. }));
    assert_eq!(
        error.to_string(),
        "kernel `grouped_gemm_up` for `cpu:avx2` is not in the cache /no/such/cache, and strict \
         mode does not compile\nadd it with: moesaic precompile --spec layer.toml --target \
         cpu:avx2 --cache /no/such/cache"
    );
}

#[test]
fn facts_are_remembered_by_name_and_type() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let name = "compiler ../../etc/\0 /usr/bin/cc";
    assert_eq!(store.fact::<String>(name), None);
    store.remember(name, &"gcc 12").unwrap();
    assert_eq!(store.fact::<String>(name).as_deref(), Some("gcc 12"));
    assert_eq!(store.fact::<Vec<u32>>(name), None);
    assert_eq!(store.fact::<String>("compiler"), None);
    let [file] = &files(dir.path())[..] else {
        panic!()
    };
    fs::write(dir.path().join(file), "{").unwrap();
    assert_eq!(store.fact::<String>(name), None);
}

/// Puts kernels of 1000 bytes and more, the i-th one last used i days ago.
fn aged(store: &Store, count: usize) {
    for i in 0..count {
        let source = source(&format!("dispatch_{i}"));
        store
            .put(&key(&source), &source, &stored(&source, 1000))
            .unwrap();
        let file = fs::File::options()
            .append(true)
            .open(kernel_path(store.dir(), &key(&source)));
        let used = SystemTime::now() - Duration::from_secs(86_400 * i as u64 + 60);
        file.unwrap().set_modified(used).unwrap();
    }
}

fn names(store: &Store) -> Vec<String> {
    store
        .list()
        .into_iter()
        .map(|listed| listed.info.name)
        .collect()
}

#[test]
fn a_list_is_sorted_and_says_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    aged(&store, 3);
    assert_eq!(names(&store), ["dispatch_0", "dispatch_1", "dispatch_2"]);
    let first = &store.list()[0];
    assert_eq!(first.info.entries, source("dispatch_0").entries);
    assert!(first.bytes > 1000 && first.path.is_file());
}

#[test]
fn pruning_keeps_what_was_used_last() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    aged(&store, 5);
    let day = Duration::from_secs(86_400);
    let pruned = store.prune(&PruneRule {
        max_age: Some(3 * day),
        max_bytes: None,
    });
    assert_eq!((pruned.removed, pruned.kept), (2, 3));
    // A hit counts as use, so the oldest kernel survives.
    assert!(store.get(&key(&source("dispatch_2"))).is_some());
    let room = store.prune(&PruneRule::default()).kept_bytes / 3;
    let pruned = store.prune(&PruneRule {
        max_bytes: Some(room),
        max_age: None,
    });
    assert_eq!((pruned.removed, pruned.kept), (2, 1));
    assert!(pruned.freed > 2000, "{pruned:?}");
    assert_eq!(names(&store), ["dispatch_2"]);
}

#[test]
fn pruning_touches_no_strange_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    aged(&store, 1);
    let shard = kernel_path(dir.path(), &key(&source("dispatch_0")))
        .parent()
        .unwrap()
        .to_path_buf();
    let old = SystemTime::now() - Duration::from_secs(1 << 20);
    let hex = key(&source("x")).hex();
    for strange in [
        dir.path().join("notes.txt"),
        dir.path().join(format!("{hex}.kernel")),
        shard.join("thesis.c"),
        shard.join(format!("{hex}.txt")),
        dir.path().join(format!("v1/{hex}.c")),
    ] {
        fs::File::create(strange)
            .unwrap()
            .set_modified(old)
            .unwrap();
    }
    let leftover = shard.join(".tmp-abc");
    fs::File::create(&leftover)
        .unwrap()
        .set_modified(old)
        .unwrap();
    fs::File::create(shard.join(".tmp-new")).unwrap();
    store.prune(&PruneRule {
        max_bytes: Some(0),
        max_age: None,
    });
    let left = files(dir.path());
    assert_eq!(left.len(), 6, "{left:?}");
    assert!(!leftover.exists());
}

#[test]
fn two_format_versions_live_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    aged(&store, 2);
    let of = |name: &str| kernel_path(dir.path(), &key(&source(name)));
    let newer = dir.path().join("v2");
    fs::create_dir_all(newer.join("ab")).unwrap();
    fs::copy(
        of("dispatch_0"),
        newer.join("ab").join(of("dispatch_0").file_name().unwrap()),
    )
    .unwrap();
    // A file of the next format version under this version's name is a miss.
    let mut bytes = fs::read(of("dispatch_1")).unwrap();
    bytes[8] = 2;
    fs::write(of("dispatch_1"), bytes).unwrap();
    assert!(store.get(&key(&source("dispatch_1"))).is_none());
    let verified = store.verify(OnBad::Remove);
    assert_eq!((verified.good, verified.bad.len()), (1, 1));
    assert_eq!(verified.bad[0].reason, "its format version is 2, not 1");
    store.prune(&PruneRule {
        max_bytes: Some(0),
        max_age: None,
    });
    assert!(store.list().is_empty());
    assert_eq!(files(&newer).len(), 1);
}
