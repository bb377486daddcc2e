//! Many ranks that start at once on one cache.

use crate::common::*;
use moesaic::engine::{Engine, EngineParts};
use moesaic::target::{Artifact, CompileError, CompileOptions, Compiler};
use moesaic::{LayerSpec, Store, Target};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// A C compiler that leaves a line in a file for every compile.
struct Counting {
    dir: tempfile::TempDir,
}

impl Counting {
    fn new() -> Counting {
        let dir = scratch();
        let real = moesaic::toolchain::c(&moesaic::toolchain::Registry::open().unwrap());
        let real = real.unwrap().program().display().to_string();
        let log = dir.path().join("compiles").display().to_string();
        let script = format!(
            "#!/bin/sh\ncase \" $* \" in *' -o '*) echo compile >> '{log}';; esac\nexec '{real}' \"$@\"\n"
        );
        mode(&write(dir.path(), "cc", &script), 0o755);
        Counting { dir }
    }

    fn compiler(&self) -> PathBuf {
        self.dir.path().join("cc")
    }

    /// Compiles since the last time this was asked.
    fn take(&self) -> usize {
        let log = self.dir.path().join("compiles");
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let _ = std::fs::remove_file(log);
        text.lines().count()
    }
}

/// Processes of `moesaic run`, started at once, each a world and with an output of its own.
fn ranks(small: &Small, counting: &Counting, cache: &Path, count: usize, more: &str) -> Command {
    let mut command = command();
    for name in ["RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    command
        .env("MOESAIC_CC", counting.compiler())
        .env("MOESAIC_CACHE", cache)
        .env("BIN", env!("CARGO_BIN_EXE_moesaic"))
        .env("DIR", small.dir.path())
        .env("SPEC", &small.spec);
    let script = format!(
        "R=$RANK; unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; \
         exec \"$BIN\" run --target cpu:portable --threads 1 --spec \"$SPEC\" \
         --weights \"$DIR/w.safetensors\" --input \"$DIR/x.safetensors\" \
         --output \"$DIR/y$R\" {more}"
    );
    let count = count.to_string();
    command.args([
        "launch", "-n", &count, "--mpi", "off", "--", "sh", "-c", &script,
    ]);
    command
}

/// Every rank has written the same result.
fn same_results(small: &Small, count: usize) {
    let result = |rank: usize| {
        let path = small.dir.path().join(format!("y{rank}"));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        bytes
    };
    let first = result(0);
    assert!((1..count).all(|rank| result(rank) == first));
}

#[test]
fn sixty_four_processes_on_a_cold_cache_compile_each_kernel_once() {
    let (small, counting, dir) = (Small::new(), Counting::new(), scratch());
    finish(&mut ranks(
        &small,
        &counting,
        &dir.path().join("one"),
        1,
        "",
    ))
    .ok();
    let kernels = counting.take();
    assert!(kernels >= 5, "{kernels} kernels");
    let cache = dir.path().join("many");
    finish(&mut ranks(&small, &counting, &cache, 64, "")).ok();
    assert_eq!(counting.take(), kernels);
    same_results(&small, 64);
    let verified = Store::open(&cache).verify(moesaic::cache::OnBad::Report);
    assert_eq!((verified.bad.len(), verified.leftovers), (0, 0));
}

/// Everything below a folder, and the folder.
fn below(dir: &Path) -> Vec<PathBuf> {
    let mut list = vec![dir.to_path_buf()];
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.path().is_dir() {
            list.extend(below(&entry.path()))
        } else {
            list.push(entry.path())
        }
    }
    list
}

/// Even root's programs are bound by permissions then.
fn without_privileges(command: &mut Command) {
    const OVERRIDE: [libc::c_ulong; 2] = [1, 2];
    let drop_rights = || {
        for right in OVERRIDE {
            // SAFETY: numbers only; who is not root has nothing to drop.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, right, 0, 0, 0) };
        }
        Ok(())
    };
    // SAFETY: a system call, and nothing is allocated.
    unsafe { command.pre_exec(drop_rights) };
}

/// A pack that was brought into a shared folder once, which ranks can only read.
#[test]
fn a_pack_on_shared_storage_serves_all_ranks() {
    let (small, counting, dir) = (Small::new(), Counting::new(), scratch());
    let (own, shared) = (dir.path().join("own"), dir.path().join("shared"));
    let pack = dir.path().join("pack.tar.gz");
    let mut precompile = command();
    precompile
        .args(["precompile", "--target", "cpu:portable", "--spec"])
        .arg(&small.spec);
    precompile.env("MOESAIC_CC", counting.compiler());
    finish(precompile.arg("--cache").arg(&own).arg("-o").arg(&pack)).ok();
    let kernels = counting.take();
    std::fs::create_dir(&shared).unwrap();
    mode(&shared, 0o755);
    let mut import = command();
    import.args(["cache", "import"]).arg(&pack);
    finish(import.arg("--cache").arg(&shared)).ok();
    let close = |files: u32, folders: u32| {
        for path in below(&shared) {
            mode(&path, if path.is_dir() { folders } else { files });
        }
    };
    close(0o444, 0o555);
    let before = below(&shared).len();

    let mut strict = ranks(&small, &counting, &shared, 8, "--strict");
    without_privileges(&mut strict);
    finish(&mut strict).ok();
    same_results(&small, 8);
    assert_eq!(counting.take(), 0);

    // What is missing there is compiled by each rank for itself, and none fails.
    std::fs::write(&small.spec, SMALL.replace("top_k = 2", "top_k = 1")).unwrap();
    let mut missing = ranks(&small, &counting, &shared, 3, "");
    without_privileges(&mut missing);
    finish(&mut missing).ok();
    same_results(&small, 3);
    let compiled = counting.take();
    assert!(compiled > 0 && compiled <= 3 * kernels, "{compiled}");
    let after = below(&shared).len();
    close(0o644, 0o755);
    assert_eq!(after, before, "something was written");
}

/// Ranks that are threads, each with an engine and a store of its own.
#[test]
fn sixty_four_threads_on_a_cold_cache_compile_each_kernel_once() {
    struct Counted(moesaic::cpu::CpuCompiler, Arc<AtomicUsize>);

    impl Compiler for Counted {
        fn backend(&self) -> &'static str {
            self.0.backend()
        }
        fn name(&self) -> String {
            self.0.name()
        }
        fn fingerprint(&self, target: Target) -> String {
            self.0.fingerprint(target)
        }
        fn targets(&self) -> Vec<Target> {
            self.0.targets()
        }
        fn compile(
            &self,
            source: &moesaic::kernel::KernelSource,
            options: &CompileOptions,
        ) -> Result<Artifact, CompileError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.compile(source, options)
        }
    }

    let dir = scratch();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let weights = small_weights();
    // Threads with an engine each, or one engine for all.
    for (round, engines) in [(0, 64), (1, 1)] {
        let compiles = Arc::new(AtomicUsize::new(0));
        let cache = dir.path().join(round.to_string());
        let engine = || {
            let compiler = moesaic::toolchain::c(&moesaic::toolchain::Registry::open().unwrap());
            let counted = Counted(compiler.unwrap(), Arc::clone(&compiles));
            Engine::new(EngineParts {
                device: Arc::new(moesaic::cpu::CpuDevice::with_threads(1).unwrap()),
                compiler: Some(Arc::new(counted)),
                store: Some(Arc::new(Store::open(&cache))),
                strict: false,
                tuned: false,
                caches: None,
                options: CompileOptions::default(),
            })
        };
        let engines: Vec<Engine> = (0..engines).map(|_| engine()).collect();
        std::thread::scope(|scope| {
            for rank in 0..64 {
                let (spec, weights) = (&spec, &weights);
                let engine = &engines[rank % engines.len()];
                scope.spawn(move || engine.layer(spec, weights).unwrap());
            }
        });
        let kernels = Store::open(&cache).list().len();
        assert!(kernels >= 5, "{kernels} kernels");
        assert_eq!(compiles.load(Ordering::Relaxed), kernels, "round {round}");
    }
}
