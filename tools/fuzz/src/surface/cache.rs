//! The files that a store reads: kernels, tunings, facts.

use super::{Surface, folder, promise};
use crate::mutate;
use moesaic_cache::{Bucket, KernelKey, KeyParts, Store, StoredKernel, Tuned, TunedMachine};
use moesaic_kernel::{
    CpuIsa, DType, Entry, KernelSource, Language, Launch, Param, Size, Stem, Target,
};
use moesaic_spec::testing::SampleRng;
use moesaic_target::{Artifact, ArtifactReport};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const TARGET: Target = Target::Cpu(CpuIsa::Avx2);

/// Returns a kernel that no compiler made.
pub(super) fn kernel(name: &str) -> (KernelKey, KernelSource, StoredKernel) {
    let entry = Entry {
        symbol: format!("{name}_f32"),
        summary: "Does nothing.".to_string(),
        params: vec![
            Param::read("x", DType::F32, "[tokens, 7]"),
            Param::i64("tokens"),
        ],
        launch: Launch {
            grid: [Size::Tokens.ceil_div(64), Size::Const(4)],
            threads: 1,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    };
    let source = KernelSource {
        stem: Stem::Dispatch,
        name: name.to_string(),
        target: TARGET,
        language: Language::C,
        text: format!("void {name}_f32(void) {{}}\n"),
        config: String::new(),
        entries: vec![entry],
    };
    let parts = KeyParts {
        target: TARGET,
        config: "",
        source: &source.text,
        flags: "",
        compiler: "none",
    };
    let artifact = Artifact {
        binary: name.bytes().cycle().take(300).collect(),
        report: ArtifactReport {
            compiler: "none".to_string(),
            compile_ms: 1.0,
            kernels: Vec::new(),
            log: String::new(),
        },
    };
    let (key, stored) = (KernelKey::new(&parts), StoredKernel::new(&source, artifact));
    (key, source, stored)
}

pub(super) fn tuning() -> Tuned {
    let (_, source, _) = kernel("dispatch");
    let bucket = |tokens| Bucket {
        tokens,
        sizes: [("tile_rows".to_string(), 64)].into(),
        kernels: vec![moesaic_cache::hash_source(&source.text)],
        gain: 1.25,
    };
    Tuned {
        target: TARGET,
        layer: moesaic_cache::hash_source("a layer"),
        machine: TunedMachine {
            name: "A CPU".to_string(),
            threads: 2,
        },
        name: "layer".to_string(),
        buckets: vec![bucket(1), bucket(64)],
    }
}

fn only_file(folder: &Path, end: &str) -> PathBuf {
    let mut found = super::pack::files(folder)
        .into_iter()
        .filter(|path| path.to_string_lossy().ends_with(end));
    found.next().expect("the file was written")
}

/// The file of a kernel.
pub struct EntryFile {
    _folder: TempDir,
    store: Store,
    key: KernelKey,
    stored: StoredKernel,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl EntryFile {
    /// Makes a surface with one kernel in a store.
    pub fn new() -> EntryFile {
        let folder = folder();
        let store = Store::open(folder.path());
        let (key, source, stored) = kernel("dispatch");
        store.put(&key, &source, &stored).expect("a store");
        let path = only_file(folder.path(), ".kernel");
        let bytes = fs::read(&path).expect("it is there");
        EntryFile {
            _folder: folder,
            store,
            key,
            stored,
            path,
            bytes,
        }
    }
}

impl Surface for EntryFile {
    fn name(&self) -> &'static str {
        "entry"
    }

    fn share(&self) -> u64 {
        100
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        if rng.one_in(50) {
            self.bytes.clone()
        } else {
            mutate::bytes(rng, &self.bytes)
        }
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        fs::write(&self.path, input).map_err(|error| error.to_string())?;
        let found = self.store.get(&self.key);
        let same = input == self.bytes;
        promise(found.is_some() == same, || {
            format!("changed: {}, found: {}", !same, found.is_some())
        })?;
        promise(found.is_none_or(|found| found == self.stored), || {
            "another kernel".to_string()
        })?;
        Ok(same)
    }
}

/// A file of measured tile sizes.
pub struct Tuning {
    folder: TempDir,
    store: Store,
    path: PathBuf,
    text: String,
}

impl Tuning {
    /// Makes a surface with one tuning in a store.
    pub fn new() -> Tuning {
        let folder = folder();
        let store = Store::open(folder.path());
        let path = store.keep_tuned(&tuning()).expect("a store");
        let text = fs::read_to_string(&path).expect("it is there");
        Tuning {
            folder,
            store,
            path,
            text,
        }
    }
}

const TUNING_WORDS: &[&str] = &[
    "\"sizes\": {},",
    "\"tokens\": 3,",
    "\"layer\": \"../../x\",",
    "cpu:avx512",
    "\"gain\": 1e400",
];

impl Surface for Tuning {
    fn name(&self) -> &'static str {
        "tuning"
    }

    fn share(&self) -> u64 {
        30
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        mutate::text(rng, std::slice::from_ref(&self.text), TUNING_WORDS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        fs::write(&self.path, input).map_err(|error| error.to_string())?;
        let want = tuning();
        let found = self.store.tuned(want.target, &want.layer, &want.machine);
        if let Some(found) = &found {
            let asked = (found.target, &found.layer, &found.machine)
                == (want.target, &want.layer, &want.machine);
            promise(asked, || format!("another's: {found:?}"))?;
            promise(
                found.buckets.iter().all(|bucket| bucket.gain.is_finite()),
                || "no gain".to_string(),
            )?;
        }
        // A store can write what it reads, and stays inside its folder.
        for tuned in self.store.tunings() {
            let copy = Store::open(self.folder.path().join("a/b/c/copy"));
            let path = copy.keep_tuned(&tuned).map_err(|error| error.to_string())?;
            let plain = path.parent() == Some(&*self.folder.path().join("a/b/c/copy/v1/tuned"));
            promise(plain, || format!("it would be kept in {}", path.display()))?;
            fs::remove_file(path).map_err(|error| error.to_string())?;
        }
        Ok(found.is_some())
    }
}

/// A small remembered fact.
pub struct Fact {
    _folder: TempDir,
    store: Store,
    path: PathBuf,
    text: String,
}

impl Fact {
    /// Makes a surface with one fact in a store.
    pub fn new() -> Fact {
        let folder = folder();
        let store = Store::open(folder.path());
        store
            .remember("compiler cc", &"gcc 12".to_string())
            .expect("a store");
        let path = only_file(folder.path(), ".json");
        let text = fs::read_to_string(&path).expect("it is there");
        Fact {
            _folder: folder,
            store,
            path,
            text,
        }
    }
}

impl Surface for Fact {
    fn name(&self) -> &'static str {
        "fact"
    }

    fn share(&self) -> u64 {
        20
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        mutate::text(
            rng,
            std::slice::from_ref(&self.text),
            &["\"name\": \"x\",", "null", "[\"gcc\"]"],
        )
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        fs::write(&self.path, input).map_err(|error| error.to_string())?;
        let as_text: Option<String> = self.store.fact("compiler cc");
        let as_number: Option<u64> = self.store.fact("compiler cc");
        promise(as_text.is_none() || as_number.is_none(), || {
            "both a text and a number".to_string()
        })?;
        Ok(as_text.is_some() || as_number.is_some())
    }
}
