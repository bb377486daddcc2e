//! Several processes on one store, some of them killed. The children are this test binary again,
//! running only [`child`].

use crate::common::{artifact, key, request, source, stored};
use moesaic_cache::{KernelOrigin, OnBad, PruneRule, Store};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "MOESAIC_TEST_ROLE";
const DIR: &str = "MOESAIC_TEST_DIR";

fn spawn(role: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--nocapture"])
        .env(ROLE, role)
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Plays the part of a child process. In the test's own process it does nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let dir = std::path::PathBuf::from(std::env::var_os(DIR).unwrap());
    match role.as_str() {
        "race" => race(&dir),
        "write" => write_forever(&dir),
        "hold" => hold(&dir),
        "cramped" => cramped(&dir),
        _ => panic!("{role}"),
    }
}

/// Fetches a few kernels, and adds a line to a file for every compile.
fn race(dir: &Path) {
    let store = Store::open(dir.join("cache"));
    for i in 0..3 {
        let source = source(&format!("dispatch_{i}"));
        let compile = || {
            let log = std::fs::File::options()
                .append(true)
                .create(true)
                .open(dir.join("compiles"));
            log.unwrap().write_all(b".").unwrap();
            std::thread::sleep(Duration::from_millis(40));
            Ok(artifact(&source.name, 20_000))
        };
        let fetched = store.get_or_compile(&request(&source), compile).unwrap();
        assert_eq!(fetched.stored.artifact, artifact(&source.name, 20_000));
        assert!(fetched.trouble.is_none());
    }
}

/// Starts a compile that never ends.
fn hold(dir: &Path) {
    let store = Store::open(dir.join("cache"));
    let source = source("dispatch_0");
    let compile = || {
        std::fs::write(dir.join("holding"), "").unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    };
    let _ = store.get_or_compile(&request(&source), compile);
}

fn write_forever(dir: &Path) {
    let store = Store::open(dir);
    for i in 0_usize.. {
        let source = source(&format!("dispatch_{}", i % 50));
        store
            .put(&key(&source), &source, &stored(&source, 200_000))
            .unwrap();
    }
}

/// Uses a store on a disk that takes at most 64 KiB per file.
fn cramped(dir: &Path) {
    let limit = libc::rlimit {
        rlim_cur: 64 << 10,
        rlim_max: 64 << 10,
    };
    // SAFETY: both calls only change this process, which is a child made for
    // this; the limit outlives the call.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    let store = Store::open(dir);
    let big = source("big");
    let fetched = store
        .get_or_compile(&request(&big), || Ok(artifact("big", 100_000)))
        .unwrap();
    assert_eq!(
        (fetched.origin, fetched.stored.artifact.binary.len()),
        (KernelOrigin::Compiled, 100_000)
    );
    let trouble = fetched.trouble.unwrap().to_string();
    assert!(
        trouble.contains("the kernel cache cannot write"),
        "{trouble}"
    );
    let small = source("small");
    let fetched = store
        .get_or_compile(&request(&small), || Ok(artifact("small", 1000)))
        .unwrap();
    assert!(fetched.trouble.is_none());
    assert!(store.get(&key(&small)).is_some() && store.get(&key(&big)).is_none());
    let verified = store.verify(OnBad::Report);
    assert_eq!(
        (verified.good, verified.bad.len(), verified.leftovers),
        (1, 0, 0)
    );
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[test]
fn sixteen_cold_processes_compile_each_kernel_once() {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..16).map(|_| spawn("race", dir.path())).collect();
    children.into_iter().for_each(finish);
    let compiles = std::fs::read(dir.path().join("compiles")).unwrap().len();
    assert_eq!(
        compiles, 3,
        "16 processes compiled 3 kernels {compiles} times"
    );
    let store = Store::open(dir.path().join("cache"));
    let verified = store.verify(OnBad::Report);
    assert_eq!(
        (verified.good, verified.bad.len(), verified.leftovers),
        (3, 0, 0)
    );
}

/// When a compiling process is killed, the waiting ones go on and one of them compiles. Their
/// patience is longer than a test may take, so a process that merely waited would fail it.
#[test]
fn a_process_killed_while_compiling_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = spawn("hold", dir.path());
    while !dir.path().join("holding").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let compiles = std::sync::atomic::AtomicUsize::new(0);
    let source = source("dispatch_0");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let patience = Duration::from_secs(24 * 60 * 60);
                let store = Store::open(dir.path().join("cache")).patience(patience);
                let compile = || {
                    compiles.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    Ok(artifact("dispatch_0", 1000))
                };
                let fetched = store.get_or_compile(&request(&source), compile).unwrap();
                assert!(fetched.trouble.is_none());
            });
        }
        // Give the others time to wait: none may compile while the holder lives.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(compiles.load(std::sync::atomic::Ordering::Relaxed), 0);
        holder.kill().unwrap();
        holder.wait().unwrap();
    });
    assert_eq!(compiles.into_inner(), 1);
}

#[test]
fn a_process_killed_while_writing_leaves_whole_kernels_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path());
    let mut seen = 0;
    for round in 0..25_u64 {
        let mut child = spawn("write", dir.path());
        std::thread::sleep(Duration::from_micros(4000 + round * round * 7919 % 23_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let verified = store.verify(OnBad::Report);
        assert_eq!(verified.bad, []);
        seen += verified.good + verified.leftovers;
    }
    assert!(seen > 0, "every child was killed before it wrote");
    let source = source("dispatch_0");
    let fetched = store.get_or_compile(&request(&source), || Ok(artifact("dispatch_0", 200_000)));
    assert_eq!(
        fetched.unwrap().stored.artifact,
        artifact("dispatch_0", 200_000)
    );
    assert!(store.get(&key(&source)).is_some());
    store.prune(&PruneRule::default());
    assert_eq!(store.verify(OnBad::Report).bad, []);
}

/// A limit on file sizes stands in for a full disk: it fails in the middle of a write in the same
/// way, without privileges.
#[test]
fn a_full_disk_stops_no_kernel() {
    let dir = tempfile::tempdir().unwrap();
    finish(spawn("cramped", dir.path()));
}
