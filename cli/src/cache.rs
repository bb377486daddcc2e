//! `moesaic cache`.

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::check_output;
use crate::form::FormArgs;
use crate::precompile::most_registers;
use crate::store::{StoreArgs, place, tuning};
use crate::table::Table;
use crate::targets::{self, TargetsArgs};
use crate::units;
use clap::{Args, Subcommand};
use moesaic::cache::{
    Bad, KernelInfo, KernelKey, Listed, OnBad, PackKernel, PruneRule, Tuned, Verified, list_pack,
};
use moesaic::{Store, Target};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// List, check, prune, import or export cached kernels
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic cache list
  moesaic cache list pack.tar.gz
  moesaic cache prune --older-than 30d --max-bytes 2GB
  moesaic cache export pack.tar.gz --target cuda:sm_90a
  moesaic cache import pack.tar.gz")]
pub struct CacheArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// List the kernels of the cache, or of a pack
    List(ListArgs),
    /// Read and hash every kernel and the source beside it; exit code 1 if one is damaged
    Verify(VerifyArgs),
    /// Remove kernels that are old or too many, and what killed processes left
    Prune(PruneArgs),
    /// Fill the cache from a pack
    Import(ImportArgs),
    /// Write kernels to a pack
    Export(ExportArgs),
}

#[derive(Args, Debug)]
struct ListArgs {
    /// A pack to list instead of the cache, a tar.gz
    #[arg(conflicts_with = "cache")]
    pack: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    form: FormArgs,
}

#[derive(Args, Debug)]
struct VerifyArgs {
    /// Remove damaged kernels and sources
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    form: FormArgs,
}

#[derive(Args, Debug)]
#[group(id = "rule", required = true, multiple = true, args = ["max_bytes", "older_than"])]
struct PruneArgs {
    /// Keep at most this many bytes, those used last; such as 500MB or 2GiB
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    max_bytes: Option<u64>,
    /// Remove kernels not used for this long; such as 30d or 12h
    #[arg(long, value_name = "AGE", value_parser = units::parse_duration)]
    older_than: Option<Duration>,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    form: FormArgs,
}

#[derive(Args, Debug)]
struct ImportArgs {
    /// The pack, a tar.gz
    pack: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    form: FormArgs,
}

#[derive(Args, Debug)]
#[command(mut_arg("target", |arg| arg.help("Only kernels for these targets")))]
struct ExportArgs {
    /// The pack to write, a tar.gz
    pack: PathBuf,
    #[command(flatten)]
    target: TargetsArgs,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// Lists, checks, prunes, imports or exports the kernels of a cache.
pub fn execute(args: &CacheArgs, console: &Console) -> Result {
    match &args.action {
        Action::List(args) => list(args, console),
        Action::Verify(args) => verify(args, console),
        Action::Prune(args) => prune(args, console),
        Action::Import(args) => import(args, console),
        Action::Export(args) => export(args, console),
    }
}

/// Opens the store, or fails if it cannot be read: a directory without kernels must not look the
/// same as an unusable one.
fn usable(args: &StoreArgs) -> Result<Arc<Store>> {
    let store = args.find();
    match store.trouble() {
        Some(trouble) => Err(Failure::work(trouble)),
        None => Ok(store),
    }
}

fn list(args: &ListArgs, console: &Console) -> Result {
    if let Some(pack) = &args.pack {
        return list_file(pack, args.form.json, console);
    }
    let store = usable(&args.store)?;
    let (kernels, tunings) = (store.list(), store.tunings());
    let rows: Vec<Row<'_>> = kernels.iter().map(Row::stored).collect();
    if args.form.json {
        let kernels: Vec<Value> = rows.iter().map(Row::json).collect();
        return console.json(&json!({
            "dir": place(&store),
            "kernels": kernels,
            "tunings": tunings,
        }));
    }
    console.print(&text(&rows, &tunings, &place(&store), console))
}

/// Lists the kernels of a pack, which is read and checked to its end.
fn list_file(pack: &Path, json: bool, console: &Console) -> Result {
    if pack.is_dir() {
        let failure = Failure::input(format!("{} is a directory, not a pack", pack.display()));
        let hint = format!(
            "`moesaic cache list --cache {}` lists a cache",
            pack.display()
        );
        return Err(failure.hint(hint));
    }
    check_pack(pack)?;
    let list = list_pack(pack)?;
    let rows: Vec<Row<'_>> = list.kernels.iter().map(Row::packed).collect();
    if json {
        let kernels: Vec<Value> = rows.iter().map(Row::json).collect();
        return console.json(&json!({
            "pack": pack.display().to_string(),
            "kernels": kernels,
            "tunings": list.tunings,
        }));
    }
    let place = pack.display().to_string();
    console.print(&text(&rows, &list.tunings, &place, console))
}

/// A kernel of a cache or of a pack.
struct Row<'a> {
    key: &'a KernelKey,
    info: &'a KernelInfo,
    bytes: u64,
    /// The time of its last use, which only a cache knows.
    used: Option<SystemTime>,
    /// Its file, or its member in a pack.
    path: String,
}

impl Row<'_> {
    fn stored(kernel: &Listed) -> Row<'_> {
        Row {
            key: &kernel.key,
            info: &kernel.info,
            bytes: kernel.bytes,
            used: Some(kernel.used),
            path: kernel.path.display().to_string(),
        }
    }

    fn packed(kernel: &PackKernel) -> Row<'_> {
        Row {
            key: &kernel.key,
            info: &kernel.info,
            bytes: kernel.bytes,
            used: None,
            path: kernel.member.clone(),
        }
    }

    fn cells(&self) -> [String; 8] {
        let registers = most_registers(&self.info.report);
        let age = |used| SystemTime::now().duration_since(used).unwrap_or_default();
        let none = || "-".to_string();
        [
            self.info.target.to_string(),
            self.info.layer.clone().unwrap_or_else(none),
            self.info.name.clone(),
            self.bytes.to_string(),
            registers.map_or_else(none, |n| n.to_string()),
            self.info.report.compiler.clone(),
            self.used.map_or_else(none, |used| units::ago(age(used))),
            self.key.hex()[..12].to_string(),
        ]
    }

    fn json(&self) -> Value {
        let seconds = |used: SystemTime| {
            let since = used.duration_since(SystemTime::UNIX_EPOCH);
            since.unwrap_or_default().as_secs()
        };
        json!({
            "key": self.key.to_string(),
            "layer": self.info.layer,
            "kernel": self.info.name,
            "target": self.info.target.to_string(),
            "bytes": self.bytes,
            "registers": most_registers(&self.info.report),
            "compiler": self.info.report.compiler,
            "used": self.used.map(seconds),
            "path": self.path,
        })
    }
}

/// Returns the table of kernels, their sum, and a line for each tuning.
fn text(rows: &[Row<'_>], tunings: &[Tuned], place: &str, console: &Console) -> String {
    let titles = [
        "TARGET",
        "LAYER",
        "KERNEL",
        ">BYTES",
        ">REGISTERS",
        "COMPILER",
        "USED",
        "KEY",
    ];
    let mut table = Table::new(&titles);
    for row in rows {
        table.row(row.cells());
    }
    let total = rows.iter().map(|row| row.bytes).sum();
    let summary = format!(
        "{}, {}, in {place}\n",
        units::count(rows.len(), "kernel"),
        units::bytes(total),
    );
    let table = if rows.is_empty() {
        String::new()
    } else {
        table.render(&console.out) + "\n"
    };
    let tunings = tunings.iter().map(|tuned| tuning(tuned) + "\n");
    table + &summary + &tunings.collect::<String>()
}

fn verify(args: &VerifyArgs, console: &Console) -> Result {
    let store = usable(&args.store)?;
    let on_bad = if args.remove {
        OnBad::Remove
    } else {
        OnBad::Report
    };
    let verified = store.verify(on_bad);
    if args.form.json {
        console.json(&verified_json(&verified))?
    } else {
        console.print(&verified_text(&verified, &store))?
    }
    let left = |files: &[Bad]| files.iter().filter(|bad| !bad.removed).count();
    let (kernels, sources) = (left(&verified.bad), left(&verified.bad_sources));
    let counts = [(kernels, "kernel"), (sources, "source")];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    let counts: Vec<String> = counts.map(|(n, one)| units::count(n, one)).collect();
    if counts.is_empty() {
        return Ok(());
    }
    let hint = match kernels {
        0 => {
            "people read sources, and the kernels run; `moesaic cache verify --remove` removes \
              what is damaged"
        }
        _ => "`moesaic cache verify --remove` removes what is damaged; kernels are compiled anew",
    };
    Err(Failure::work(format!("{} damaged", counts.join(" and "))).hint(hint))
}

fn verified_text(verified: &Verified, store: &Store) -> String {
    let mut text = String::new();
    for bad in verified.bad.iter().chain(&verified.bad_sources) {
        let removed = if bad.removed { " (removed)" } else { "" };
        text += &format!("{}: {}{removed}\n", bad.path.display(), bad.reason);
    }
    if verified.leftovers > 0 {
        let files = units::count(verified.leftovers, "unfinished file");
        text += &format!("{files} of killed processes; `moesaic cache prune` removes them\n");
    }
    let good = units::count(verified.good, "kernel");
    let sources = match verified.bad_sources.len() {
        0 => String::new(),
        n => format!(", {} damaged", units::count(n, "source")),
    };
    text + &format!(
        "{good} good, {} damaged{sources}, in {}\n",
        verified.bad.len(),
        place(store)
    )
}

fn verified_json(verified: &Verified) -> Value {
    let list = |files: &[Bad]| {
        let each = files.iter().map(|bad| {
            let path = bad.path.display().to_string();
            json!({ "path": path, "reason": bad.reason, "removed": bad.removed })
        });
        each.collect::<Vec<_>>()
    };
    json!({
        "good": verified.good,
        "bad": list(&verified.bad),
        "bad_sources": list(&verified.bad_sources),
        "leftovers": verified.leftovers,
    })
}

fn prune(args: &PruneArgs, console: &Console) -> Result {
    let store = usable(&args.store)?;
    let rule = PruneRule {
        max_bytes: args.max_bytes,
        max_age: args.older_than,
    };
    let pruned = store.prune(&rule);
    if args.form.json {
        console.json(&json!({
            "removed": pruned.removed,
            "freed_bytes": pruned.freed,
            "kept": pruned.kept,
            "kept_bytes": pruned.kept_bytes,
            "stuck": pruned.stuck,
        }))?;
    } else {
        console.print(&format!(
            "removed {} and {}; {} and {} stay\n",
            units::count(pruned.removed, "kernel"),
            units::bytes(pruned.freed),
            units::count(pruned.kept, "kernel"),
            units::bytes(pruned.kept_bytes)
        ))?;
    }
    match pruned.stuck {
        0 => Ok(()),
        n => Err(Failure::work(format!(
            "{} cannot be removed from {}: you may not write there",
            units::count(n, "kernel"),
            place(&store)
        ))),
    }
}

impl ExportArgs {
    /// Returns the failure for an empty export: the cache has no kernels, or only kernels for other
    /// targets.
    fn nothing(&self, store: &Store) -> Failure {
        let there = store.list().into_iter().map(|kernel| kernel.info.target);
        let mut there: Vec<String> = there.map(|target| target.to_string()).collect();
        there.sort();
        there.dedup();
        let of = match self.target.names.as_slice() {
            [] => String::new(),
            targets => format!(" for {}", targets.join(", ")),
        };
        let what = format!("no kernels{of} to export in {}", place(store));
        let there = match there.as_slice() {
            [] => String::new(),
            targets => format!("; it has some for {}", targets.join(", ")),
        };
        Failure::input(what + &there).hint("`moesaic precompile` adds some")
    }
}

fn import(args: &ImportArgs, console: &Console) -> Result {
    check_pack(&args.pack)?;
    let store = args.store.open(console);
    let imported = store.import(&args.pack)?;
    if args.form.json {
        return console.json(&json!({ "added": imported.added, "present": imported.present }));
    }
    console.print(&format!(
        "{} added, {} were there, in {}\n",
        units::count(imported.added, "kernel"),
        imported.present,
        place(&store)
    ))
}

fn check_pack(pack: &Path) -> Result {
    let meta = pack.metadata();
    match meta {
        Err(error) => Err(Failure::unreadable("the pack", pack, &error)),
        Ok(meta) if meta.is_dir() => Err(Failure::input(format!(
            "{} is a directory, not a pack",
            pack.display()
        ))),
        Ok(_) => Ok(()),
    }
}

fn export(args: &ExportArgs, console: &Console) -> Result {
    let store = usable(&args.store)?;
    check_output("the pack", &args.pack)?;
    let targets: Vec<Target> = targets::resolve(&args.target.names)?;
    let chosen = |kernel: &Listed| targets.is_empty() || targets.contains(&kernel.info.target);
    if !store.list().iter().any(chosen) {
        return Err(args.nothing(&store));
    }
    let exported = store.export(&args.pack, chosen)?;
    if args.form.json {
        return console.json(&json!({ "kernels": exported.kernels, "bytes": exported.bytes }));
    }
    console.print(&format!(
        "{}: {}, {}\n",
        args.pack.display(),
        units::count(exported.kernels, "kernel"),
        units::bytes(exported.bytes)
    ))
}
