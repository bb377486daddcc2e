//! Holds `docs/CLI.md` to the program: the page explains what help cannot, and every command and
//! option that it mentions must be there.

use crate::args::Cli;
use clap::{Command, CommandFactory};
use std::collections::BTreeSet;
use std::path::Path;

/// Options of programs other than moesaic, which the page shows.
const FOREIGN: [&str; 3] = ["--release", "--path", "--allow-run-as-root"];

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CLI.md");
    std::fs::read_to_string(path).expect("the page")
}

fn program() -> Command {
    let mut program = Cli::command();
    program.build();
    program
}

/// Returns the commands that a user sees, below this one.
fn below(command: &Command) -> impl Iterator<Item = &Command> {
    let all = command.get_subcommands();
    all.filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

/// Returns the long options of a command and of those below it.
fn options(command: &Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(|arg| arg.get_long());
    let mut all: BTreeSet<String> = own.map(|long| format!("--{long}")).collect();
    all.extend(below(command).flat_map(options));
    all
}

/// Returns the words of a text that begin with two dashes.
fn mentioned(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    let options = words.filter(|word| word.starts_with("--") && word.len() > 2);
    options.filter(|word| !word[2..].starts_with('-')).collect()
}

#[test]
fn the_page_has_every_command() {
    let page = page();
    for command in below(&program()) {
        let name = command.get_name();
        let row = page.lines().any(|line| {
            line.starts_with(&format!("| `{name}` |")) || line.starts_with(&format!("| [`{name}`]"))
        });
        assert!(row, "docs/CLI.md has no row for `{name}`");
        assert!(
            page.contains(&format!("moesaic {name} ")),
            "docs/CLI.md has no example of `{name}`"
        );
    }
}

#[test]
fn the_page_names_options_that_are_there() {
    let (page, program) = (page(), program());
    let known = options(&program);
    let gone: Vec<&str> = mentioned(&page)
        .into_iter()
        .filter(|option| !known.contains(*option) && !FOREIGN.contains(option))
        .collect();
    assert!(
        gone.is_empty(),
        "docs/CLI.md names options of no command: {gone:?}"
    );
}

/// Every example has the options of its own command.
#[test]
fn the_pages_examples_are_of_their_commands() {
    let (page, program) = (page(), program());
    let mut tried = 0;
    for line in page.lines().filter(|line| line.starts_with("    ")) {
        for example in line.split("moesaic ").skip(1) {
            let mut command = &program;
            let mut own = example.split(" -- ").next().unwrap_or_default();
            while let Some((word, rest)) = own.trim_start().split_once(' ') {
                let Some(next) = below(command).find(|one| one.get_name() == word) else {
                    break;
                };
                (command, own) = (next, rest);
            }
            let known = options(command);
            for option in mentioned(own) {
                let name = command.get_name();
                assert!(known.contains(option), "`{name}` has no {option}: {line}");
            }
            tried += 1;
        }
    }
    assert!(tried >= 12, "{tried} examples");
}
