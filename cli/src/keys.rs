//! Weights under the names of another library.

use crate::failure::{Failure, Result};
use clap::{Args, ValueEnum};
use moesaic::spec::keys::CheckpointLibrary;
use moesaic::weights::KeyOptions;

/// The option `--keys`, and the layer and gate of the file.
#[derive(Args, Clone, Debug)]
pub struct KeysArgs {
    /// The weights have the names of a state dict of this library, instead of canonical ones
    #[arg(long, value_name = "LIBRARY")]
    keys: Option<LibraryArg>,
    /// The layer's name in the state dict, such as blocks.3.moe, where there are several
    #[arg(long, value_name = "NAME", requires = "keys")]
    prefix: Option<String>,
    /// Index of the gate, in a Tutel layer with several gates
    #[arg(long, value_name = "N", requires = "keys")]
    gate: Option<usize>,
}

/// Libraries whose tensor names can be read.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LibraryArg {
    Tutel,
    Fastmoe,
}

impl KeysArgs {
    /// Returns the options if `--keys` was given.
    pub fn get(&self) -> Option<KeyOptions> {
        Some(KeyOptions {
            library: match self.keys? {
                LibraryArg::Tutel => CheckpointLibrary::Tutel,
                LibraryArg::Fastmoe => CheckpointLibrary::FastMoe,
            },
            prefix: self.prefix.clone(),
            gate: self.gate,
        })
    }

    /// Returns the options, or fails if `--keys` was not given.
    pub fn required(&self) -> Result<KeyOptions> {
        let names = CheckpointLibrary::ALL
            .map(CheckpointLibrary::name)
            .join(" or ");
        self.get()
            .ok_or_else(|| Failure::input(format!("whose names are they? --keys {names}")))
    }
}
