//! The readers of inputs, and their promises for any of them.

#[path = "../../../../tests/oracle/archive.rs"]
mod archive;
mod cache;
mod call;
mod codes;
mod encode;
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
    /// Returns the name on the command line.
    fn name(&self) -> &'static str;

    /// Returns the number of inputs for it among a thousand.
    fn share(&self) -> u64;

    /// Returns a random input, mostly a broken one.
    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8>;

    /// Reads the input and checks the answer against the promises. Returns true
    /// if the input was accepted; the error is a broken promise.
    fn check(&mut self, input: &[u8]) -> Result<bool, String>;

    /// Prepares what the first check needs, outside the counts of a check.
    fn begin(&mut self) {}

    /// Returns the most bytes that reading an input of this length may hold at
    /// once.
    fn memory(&self, length: usize) -> usize {
        (4 << 20) + 500 * length
    }

    /// Returns the most bytes that reading an input of this length may allocate
    /// in all.
    fn work(&self, length: usize) -> usize {
        (16 << 20) + 4000 * length
    }
}

/// Returns every surface.
pub fn surfaces() -> Vec<Box<dyn Surface>> {
    vec![
        Box::new(text::Spec::new()),
        Box::new(text::Config::new()),
        Box::new(text::Activation::new()),
        Box::new(weights::File::new()),
        Box::new(weights::Index::new()),
        Box::new(quantized::Quantized::new()),
        Box::new(codes::Codes::new()),
        Box::new(gguf::Gguf::new()),
        Box::new(encode::Encode),
        Box::new(cache::EntryFile::new()),
        Box::new(cache::Tuning::new()),
        Box::new(cache::Fact::new()),
        Box::new(pack::Pack::new()),
        Box::new(call::Call::new()),
        Box::new(words::Words::new()),
    ]
}

/// Returns the surface of that name.
pub fn surface(name: &str) -> Option<Box<dyn Surface>> {
    surfaces()
        .into_iter()
        .find(|surface| surface.name() == name)
}

/// Returns a folder in memory where the system has one, because many small
/// files come and go.
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

/// Fails with a sentence unless `holds`.
fn promise(holds: bool, sentence: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(sentence()) }
}
