//! The arguments that all commands share, and the list of commands.

use crate::palette::ColorChoice;
use clap::{Parser, Subcommand};

/// The parsed command line of the process.
#[derive(Parser, Debug)]
#[command(
    name = "moesaic",
    version,
    about = "A Mixture-of-Experts kernel compiler",
    long_about = "A Mixture-of-Experts kernel compiler: from a layer spec to specialised kernels for \
                  CPU, CUDA and ROCm, compiled, cached, inspected and run.",
    after_help = EXAMPLES,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    // These three come last in the help of a command, whose own options are what people look for.
    /// When to colour: auto, always or never
    #[arg(
        long,
        global = true,
        display_order = 900,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub color: ColorChoice,
    /// Print only errors and warnings: no notes and no progress
    #[arg(
        short,
        long,
        global = true,
        display_order = 901,
        conflicts_with = "verbose"
    )]
    pub quiet: bool,
    /// Print details, and with -vv what the library logs
    #[arg(short, long, global = true, display_order = 902, action = clap::ArgAction::Count)]
    pub verbose: u8,
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  moesaic run --hf ~/models/mixtral --layer 3 --input x.safetensors --output y.safetensors
  moesaic emit --spec layer.toml --target cuda:sm_90a,rocm:gfx942 -o kernels
  moesaic inspect --spec layer.toml --target cpu --html report.html
  moesaic precompile --spec layer.toml --target cuda:sm_80,cuda:sm_90a -o pack.tar.gz
  moesaic launch -n 4 -- ./program
  moesaic doctor

Exit codes: 0 done, 1 failed while working, 2 bad input or usage (nothing was done).";

/// The commands of the program.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a layer on tokens from a file
    Run(crate::run::RunArgs),
    /// Write the source of a layer's kernels
    Emit(crate::emit::EmitArgs),
    /// Show a layer's plan, kernels, resources, launches and roofline
    Inspect(crate::inspect::InspectArgs),
    /// Compile kernels for any target into a cache or a pack
    Precompile(crate::precompile::PrecompileArgs),
    /// Time a layer and compare it with the machine's limits
    Bench(crate::bench::BenchArgs),
    /// Measure which tiles are best for a layer on this CPU, and use them from now on
    Tune(crate::tune::TuneArgs),
    /// Predict how long a layer over many ranks takes, and rank meshes and strategies
    Plan(crate::plan::PlanArgs),
    /// List, check, prune, import or export cached kernels
    Cache(crate::cache::CacheArgs),
    /// Install or list compilers
    Toolchain(crate::toolchain::ToolchainArgs),
    /// Check a spec, or show the spec of a Hugging Face layer
    Spec(crate::spec::SpecArgs),
    /// Add experts to a trained layer, split and merge checkpoints
    Experts(crate::experts::ExpertsArgs),
    /// Quantize the experts of a full-precision model
    Quantize(crate::quantize::QuantizeArgs),
    /// Start ranks of a program on this machine
    #[cfg(target_os = "linux")]
    Launch(crate::launch::LaunchArgs),
    /// A rank of `moesaic launch`
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    LaunchRank(crate::launch::LaunchRankArgs),
    /// Say what this machine can compile and run
    Doctor(crate::doctor::DoctorArgs),
    /// Print shell completions
    Completions(crate::completions::CompletionsArgs),
}

impl Command {
    /// Returns whether the command handles signals itself, so that its ranks end in order.
    #[cfg(unix)]
    pub fn hears_signals(&self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Command::Launch(_) | Command::LaunchRank(_) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::{Arg, Command, CommandFactory};

    /// Returns the arguments that an argument requires. clap shows them in no other way.
    fn required(arg: &Arg) -> Vec<String> {
        let shown = format!("{arg:?}");
        let (_, list) = shown.split_once("requires: [").unwrap();
        let (list, _) = list.split_once(']').unwrap();
        let words = list.split('"').skip(1).step_by(2);
        words.map(str::to_string).collect()
    }

    fn conflict(command: &Command, one: &Arg, other: &Arg) -> bool {
        let names = |from: &Arg, to: &Arg| command.get_arg_conflicts_with(from).contains(&to);
        let mut alternatives = command.get_groups().filter(|group| {
            let args: Vec<_> = group.get_args().collect();
            let mut own = (*group).clone();
            !own.is_multiple() && args.contains(&one.get_id()) && args.contains(&other.get_id())
        });
        names(one, other) || names(other, one) || alternatives.next().is_some()
    }

    fn check(command: &Command, found: &mut usize) {
        let args: Vec<&Arg> = command.get_arguments().collect();
        for arg in &args {
            let needed = required(arg);
            let needed = args
                .iter()
                .filter(|one| needed.iter().any(|id| one.get_id() == id));
            for need in needed {
                *found += 1;
                let others = args
                    .iter()
                    .filter(|one| ![arg.get_id(), need.get_id()].contains(&one.get_id()));
                for other in others.filter(|one| conflict(command, need, one)) {
                    let (own, name) = (arg.get_id(), command.get_name());
                    assert!(
                        conflict(command, arg, other),
                        "{name}: --{own} needs --{}, and is ignored beside --{}",
                        need.get_id(),
                        other.get_id()
                    );
                }
            }
        }
        command
            .get_subcommands()
            .for_each(|inner| check(inner, found));
    }

    /// clap waives what an option requires where another one conflicts with the required one, so an
    /// option whose requirement is missing would do nothing.
    #[test]
    fn no_option_is_ignored_because_another_conflicts_with_what_it_needs() {
        let mut command = Cli::command();
        command.build();
        let mut found = 0;
        check(&command, &mut found);
        assert!(found > 20, "{found}");
    }

    /// Returns the commands with an option `--output`, this one and those below.
    fn with_output(command: &Command) -> Vec<&Command> {
        let own = command
            .get_arguments()
            .any(|arg| arg.get_long() == Some("output"));
        let inner = command.get_subcommands().flat_map(with_output);
        own.then_some(command).into_iter().chain(inner).collect()
    }

    #[test]
    fn every_output_has_the_same_short_form() {
        let command = Cli::command();
        let commands = with_output(&command);
        assert!(commands.len() > 8, "{}", commands.len());
        for command in commands {
            let short =
                |arg: &Arg| arg.get_short() == Some('o') && arg.get_long() == Some("output");
            assert!(command.get_arguments().any(short), "{}", command.get_name());
        }
    }
}
