//! The project's own tests, one binary: kernels against the reference,
//! emitted text against golden files and real compilers, and the rules of
//! the house.

mod conformance;
mod golden;
mod mutants;
mod oracle;
mod tidy;
mod training;
