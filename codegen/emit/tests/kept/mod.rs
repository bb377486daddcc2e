//! A compiler whose results lie in the build folder: a suite that runs again
//! compiles what has changed, and no kernel twice.

use moesaic_cache::{Key, KeyParts, PruneRule, Request, Store};
use moesaic_kernel::{KernelSource, Target};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler};
use std::sync::LazyLock;

/// Bytes that stay from one run to the next.
const ROOM: u64 = 2 << 30;

static STORE: LazyLock<Store> = LazyLock::new(|| {
    let store = Store::open(concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels"));
    store.prune(&PruneRule {
        max_bytes: Some(ROOM),
        max_age: None,
    });
    store
});

/// The compiler behind it is asked for what is new, and for every error.
pub struct Kept<C>(pub C);

impl<C: Compiler> Compiler for Kept<C> {
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
        let request = Request {
            key: Key::new(&parts),
            source,
            spec: None,
        };
        match STORE.get_or_compile(&request, || self.0.compile(source, options)) {
            Ok(fetched) => Ok(fetched.stored.artifact.clone()),
            Err(_) => self.0.compile(source, options),
        }
    }
}
