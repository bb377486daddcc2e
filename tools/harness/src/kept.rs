//! A compiler whose results lie in the build folder: a suite that runs again
//! compiles what has changed, and no kernel twice.

use moesaic_cache::{KernelKey, KernelRequest, KeyParts, PruneRule, Store, hash_source};
use moesaic_kernel::{KernelSource, Target};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

/// Bytes that stay from one run to the next.
const ROOM: u64 = 2 << 30;

static STORE: LazyLock<Store> = LazyLock::new(|| {
    let store = Store::open(build_folder().join("tmp/kernels"));
    store.prune(&PruneRule {
        max_bytes: Some(ROOM),
        max_age: None,
    });
    store
});

/// Returns where cargo builds: `target`, or what it was told; a test lies in `PROFILE/deps` of it.
pub fn build_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a program knows where it lies");
    let folder = test.ancestors().nth(3).expect("cargo built it");
    folder.to_path_buf()
}

/// Runs a check that panics when it fails, unless one of these parts has
/// passed before. They are everything that it depends on.
pub fn once(parts: &[&str], check: impl FnOnce()) {
    let whole: String = parts.iter().map(|p| format!("{}\n{p}", p.len())).collect();
    let name = format!("passed {}", hash_source(&whole));
    if STORE.fact(&name) == Some(true) {
        return;
    }
    check();
    // What cannot be kept is checked again.
    let _ = STORE.remember(&name, &true);
}

/// The compiler behind it is asked for what is new, and for every error.
pub struct Kept(pub Arc<dyn Compiler>);

impl Kept {
    /// Keeps what `compiler` makes.
    pub fn new(compiler: impl Compiler + 'static) -> Kept {
        Kept(Arc::new(compiler))
    }
}

impl Compiler for Kept {
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
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        let parts = KeyParts {
            target: source.target,
            config: &format!("{:?}", source.entries),
            source: &source.text,
            flags: &format!("{options:?}"),
            compiler: &self.fingerprint(source.target),
        };
        let request = KernelRequest {
            key: KernelKey::new(&parts),
            source,
            spec: None,
            layer: None,
        };
        match STORE.get_or_compile(&request, || self.0.compile(source, options)) {
            Ok(fetched) => Ok(fetched.stored.artifact.clone()),
            Err(_) => self.0.compile(source, options),
        }
    }
}
