//! The form of what a command prints.

use clap::Args;

/// The option `--json`.
#[derive(Args, Clone, Copy, Debug)]
pub struct FormArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
