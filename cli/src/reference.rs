//! The part of `docs/CLI.md` that lists every command and option, generated from the program's own
//! help.

use crate::args::Cli;
use clap::{Arg, Command, CommandFactory};
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!-- What follows is made by `cargo xtask bless` of the program's help. -->\n";
const END: &str = "<!-- Made until here. -->\n";

fn tables() -> String {
    let mut program = Cli::command();
    program.build();
    let mut page = String::new();
    describe(&program, "moesaic", &mut page);
    page
}

/// Describes a command and then its subcommands. The options of `help` itself are left out.
fn describe(command: &Command, name: &str, page: &mut String) {
    let options: Vec<&Arg> = command
        .get_arguments()
        .filter(|a| is_listed(a, name))
        .collect();
    if !options.is_empty() {
        let about = command.get_about().map(ToString::to_string);
        let about = about.unwrap_or_default();
        // Writing to a string does not fail.
        let _ = write!(page, "\n### `{name}`\n\n{about}.\n\n| | |\n|---|---|\n");
        for option in options {
            let _ = writeln!(page, "| `{}` | {} |", written(option), help(option));
        }
    }
    let below = command.get_subcommands();
    for command in below.filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        describe(command, &format!("{name} {}", command.get_name()), page);
    }
}

/// Returns whether an option is listed with this command. Options of all commands are listed once.
fn is_listed(option: &Arg, command: &str) -> bool {
    let everywhere = option.is_global_set() && command != "moesaic";
    let own = ["help", "version"].contains(&option.get_id().as_str());
    !(everywhere || own || option.is_hide_set())
}

/// Returns an option as help shows it, such as `-o, --output <FILE>`, without colours.
fn written(option: &Arg) -> String {
    let short = option.get_short().map(|c| format!("-{c}, "));
    let short = short.filter(|_| option.get_long().is_some());
    cell(&format!("{}{option}", short.unwrap_or_default()))
}

/// Returns the first paragraph of the option's help, the values it accepts and its default.
fn help(option: &Arg) -> String {
    let mut text = option
        .get_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let values = option.get_possible_values();
    let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    if option.get_action().takes_values()
        && !names.is_empty()
        && !option.is_hide_possible_values_set()
    {
        text += &format!(": `{}`", names.join("`, `"));
    }
    let defaults: Vec<_> = option
        .get_default_values()
        .iter()
        .map(|v| v.to_string_lossy())
        .collect();
    if option.get_action().takes_values() && !defaults.is_empty() {
        text += &format!("; `{}` if not given", defaults.join(","));
    }
    cell(&text)
}

/// Escapes text for a table cell, which a bar would end.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[test]
fn the_page_lists_every_command_and_option() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CLI.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (before, rest) = page.split_once(BEGIN).expect("where the tables begin");
    let (listed, after) = rest.split_once(END).expect("where they end");
    let wanted = format!("{}\n", tables());
    if std::env::var_os("BLESS").is_some() {
        let page = [before, BEGIN, &wanted, END, after].concat();
        return std::fs::write(&path, page).expect("a writable tree");
    }
    let missing: Vec<&str> = wanted
        .lines()
        .filter(|line| !listed.contains(line))
        .collect();
    assert!(
        listed == wanted,
        "docs/CLI.md is not what the program's help says: cargo xtask bless; it lacks\n{}",
        missing.join("\n")
    );
}
