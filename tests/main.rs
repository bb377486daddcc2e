//! The project's own tests, one binary: kernels against the reference,
//! emitted text against golden files and real compilers, and the rules of
//! the house.

mod compared;
mod conformance;
mod cycles;
mod errors;
mod golden;
mod golden_files;
mod layer_macro;
mod mutants;
mod new_project;
mod old_words;
mod oracle;
mod pages;
mod prose;
mod tidy;
mod training;

/// The repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
