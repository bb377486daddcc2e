//! What reads inputs, and what it promises for any of them.

mod cache;
mod call;
mod gguf;
mod pack;
mod quantized;
mod text;
mod weights;
mod words;

use moesaic_spec::testing::SampleRng;
use std::path::{Path, PathBuf};

/// One kind of input.
pub trait Surface {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// How many of a thousand inputs are for it.
    fn share(&self) -> u64;

    /// A random input, mostly a broken one.
    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8>;

    /// Reads the input and holds the answer against what is promised. Whether
    /// it was accepted; the error is a promise that was broken.
    fn check(&mut self, input: &[u8]) -> Result<bool, String>;

    /// What has to be there before the first check, and is not part of one.
    fn begin(&mut self) {}

    /// Most bytes that reading so many may hold at once.
    fn memory(&self, length: usize) -> usize {
        (4 << 20) + 500 * length
    }

    /// Most bytes that reading so many may allocate in all.
    fn work(&self, length: usize) -> usize {
        (16 << 20) + 4000 * length
    }
}

/// Every surface.
pub fn surfaces() -> Vec<Box<dyn Surface>> {
    vec![
        Box::new(text::Spec::new()),
        Box::new(text::Config::new()),
        Box::new(text::Activation::new()),
        Box::new(weights::File::new()),
        Box::new(weights::Index::new()),
        Box::new(quantized::Quantized::new()),
        Box::new(gguf::Gguf::new()),
        Box::new(cache::EntryFile::new()),
        Box::new(cache::Tuning::new()),
        Box::new(cache::Fact::new()),
        Box::new(pack::Pack::new()),
        Box::new(call::Call::new()),
        Box::new(words::Words::new()),
    ]
}

/// The surface of that name.
pub fn surface(name: &str) -> Option<Box<dyn Surface>> {
    surfaces()
        .into_iter()
        .find(|surface| surface.name() == name)
}

/// A folder in memory where the system has one: many small files come and go.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    made.expect("a temporary folder")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Fails with a sentence unless it holds.
fn promise(holds: bool, sentence: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(sentence()) }
}
