//! `moesaic completions`.

use crate::console::Console;
use crate::failure::Result;
use clap::{Args, Command};
use clap_complete::{Shell, generate};

/// Print shell completions
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic completions bash > ~/.local/share/bash-completion/completions/moesaic
  moesaic completions zsh > ~/.zfunc/_moesaic
  moesaic completions fish > ~/.config/fish/completions/moesaic.fish")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints the completion script of a shell.
pub fn execute(args: &CompletionsArgs, mut program: Command, console: &Console) -> Result {
    let mut script = Vec::new();
    generate(args.shell, &mut program, "moesaic", &mut script);
    console.print(&String::from_utf8_lossy(&script))
}
