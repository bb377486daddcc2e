//! Runs the items of a suite in a process of their own, so that a kernel that hangs or
//! breaks the device costs one item and not the rest.

use crate::commands::Place;
use crate::items::{Item, Suite};
use crate::open::Absent;
use crate::watch::{self, Heard, LOST, Process, say};
use crate::{ABSENT, CUT, Result};
use clap::Args;
use moesaic::Engine;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a suite is run with.
#[derive(Args)]
pub struct Options {
    /// Which.
    #[arg(value_enum)]
    suite: Suite,
    #[command(flatten)]
    place: Place,
    /// The folder with the fixtures of the oracles.
    #[arg(long)]
    data: PathBuf,
    /// Few items.
    #[arg(long)]
    tiny: bool,
    /// In this process, which a debugger or a sanitizer may watch.
    #[arg(long)]
    here: bool,
    /// The first item.
    #[arg(long, default_value_t = 0, overrides_with = "from")]
    from: usize,
    /// Seconds that an item may take.
    #[arg(long, default_value_t = 60)]
    each: u64,
    /// Seconds after which no item is begun.
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
}

/// The device no longer answers, so the process ends.
const BROKEN: i32 = 3;

/// Runs a suite: 0 when all agrees, 1 when something does not, 4 when time was up before
/// the end and nothing had failed.
///
/// # Errors
/// When there is no device.
pub fn run(options: &Options) -> Result<ExitCode> {
    let items = options.suite.items(&options.data, options.tiny);
    if options.here {
        return here(options, &items);
    }
    let start = |item: usize| {
        let mut command = watch::again()?;
        // The last word counts.
        if item > options.from {
            command.args(["--from", &item.to_string()]);
        }
        Process::start(&mut command)
    };
    let tally = watched(options, &items, start)?;
    Ok(verdict(&tally, &items))
}

/// How an item went, as a process says it in a line.
#[derive(Debug, PartialEq)]
enum Said {
    Begun(usize),
    Agrees(Duration),
    /// Other experts were chosen.
    Others,
    Fails(String),
    /// The device could not be opened.
    Absent(String),
}

impl Said {
    fn line(&self) -> String {
        match self {
            Said::Begun(item) => format!("begun {item}"),
            Said::Agrees(time) => format!("agrees {}", time.as_micros()),
            Said::Others => "others".to_string(),
            Said::Fails(why) => format!("fails {}", why.replace('\\', "\\\\").replace('\n', "\\n")),
            Said::Absent(why) => format!("absent {}", why.replace('\n', " ")),
        }
    }

    fn read(line: &str) -> Option<Said> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        Some(match word {
            "begun" => Said::Begun(rest.parse().ok()?),
            "agrees" => Said::Agrees(Duration::from_micros(rest.parse().ok()?)),
            "others" => Said::Others,
            "fails" => Said::Fails(unescaped(rest)),
            "absent" => Said::Absent(rest.to_string()),
            _ => return None,
        })
    }
}

fn unescaped(text: &str) -> String {
    let mut plain = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, letter == '\\') {
            (_, true) => plain.push(match letters.next() {
                Some('n') => '\n',
                other => other.unwrap_or('\\'),
            }),
            (letter, false) => plain.push(letter),
        }
    }
    plain
}

/// Runs items in this process and tells each on stdout.
fn here(options: &Options, items: &[Item]) -> Result<ExitCode> {
    let engine = match options.place.open() {
        Ok(engine) => engine,
        Err(error) => {
            say(&Said::Absent(error.to_string()).line());
            return Ok(ExitCode::from(ABSENT));
        }
    };
    let mut failed = false;
    for (number, item) in items.iter().enumerate().skip(options.from) {
        say(&Said::Begun(number).line());
        let said = one(item, &engine);
        say(&said.line());
        if matches!(said, Said::Fails(_)) {
            failed = true;
            if engine.device().synchronize().is_err() {
                return Ok(ExitCode::from(BROKEN as u8));
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn one(item: &Item, engine: &Engine) -> Said {
    let start = Instant::now();
    match caught(item, engine) {
        Ok(true) => Said::Agrees(start.elapsed()),
        Ok(false) => Said::Others,
        Err(why) => Said::Fails(why),
    }
}

/// Runs an item; what it says if it panics.
pub fn caught(item: &Item, engine: &Engine) -> std::result::Result<bool, String> {
    static PANIC: Mutex<String> = Mutex::new(String::new());
    let said = || PANIC.lock().unwrap_or_else(PoisonError::into_inner);
    std::panic::set_hook(Box::new(move |info| *said() = info.to_string()));
    let done = catch_unwind(AssertUnwindSafe(|| (item.run)(engine)));
    done.map_err(|_| said().clone())
}

/// What has come of the items so far.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    agree: usize,
    others: usize,
    failed: usize,
    left: usize,
}

impl Tally {
    fn count(&mut self, item: &Item, said: &Said) {
        let name = &item.name;
        match said {
            Said::Agrees(time) => {
                self.agree += 1;
                println!("ok    {:8.3} s  {name}", time.as_secs_f64());
            }
            Said::Others => {
                self.others += 1;
                println!("other           {name}: other experts were chosen");
            }
            Said::Fails(why) => {
                self.failed += 1;
                println!("FAIL            {name}");
                why.lines()
                    .take(40)
                    .for_each(|line| println!("      {line}"));
            }
            Said::Begun(_) | Said::Absent(_) => (),
        }
    }
}

/// Runs items in the processes that `start` starts with an item.
fn watched(
    options: &Options,
    items: &[Item],
    start: impl Fn(usize) -> Result<Process>,
) -> Result<Tally> {
    let end = Instant::now() + Duration::from_secs(options.seconds);
    let mut tally = Tally::default();
    let (mut next, mut lost) = (options.from, 0);
    let times = (Duration::from_secs(options.each), end);
    while next < items.len() && lost <= LOST && Instant::now() < end {
        match follow(start(next)?, items, next, times, &mut tally) {
            Ok(reached) => next = reached,
            // A device that an item broke for good is no device that never was.
            Err(error) if lost > 0 => {
                println!("FAIL: {error}");
                tally.failed += 1;
                break;
            }
            Err(error) => return Err(error),
        }
        lost += 1;
    }
    tally.left = items.len().saturating_sub(next);
    Ok(tally)
}

/// The last line, and what it is for the exit code.
fn verdict(tally: &Tally, items: &[Item]) -> ExitCode {
    let &Tally {
        agree,
        others,
        failed,
        left,
    } = tally;
    // Rounding explains few other choices, and garbage many.
    let strange = others * 4 > agree;
    if strange {
        println!("FAIL: more than one in five chose other experts");
    }
    println!(
        "{agree} of {} agree, {failed} fail, {others} chose other experts, {left} did not run",
        items.len()
    );
    ExitCode::from(match (failed, left) {
        _ if strange => 1,
        (0, 0) => 0,
        (0, _) => CUT,
        _ => 1,
    })
}

/// Reads what a process says until it ends, hangs or time is up; the item to go on with.
fn follow(
    mut process: Process,
    items: &[Item],
    first: usize,
    (each, end): (Duration, Instant),
    tally: &mut Tally,
) -> Result<usize> {
    let (mut at, mut in_flight) = (first, false);
    loop {
        // A process that starts loads the driver, which takes its time.
        let why = match process.hear(each, end)? {
            Heard::Line(line) => {
                match Said::read(&line) {
                    Some(Said::Absent(why)) => return Err(Absent(why).into()),
                    Some(Said::Begun(_)) if Instant::now() > end => return Ok(at),
                    Some(Said::Begun(item)) => (at, in_flight) = (item, true),
                    Some(said) => {
                        tally.count(&items[at], &said);
                        (at, in_flight) = (at + 1, false);
                    }
                    None => (),
                }
                continue;
            }
            Heard::Silence(time) => format!("no end after {} s", time.as_secs()),
            Heard::End(..) if !in_flight && (at > first || at == items.len()) => return Ok(at),
            // Also one that ends before its first item, which would end so again.
            Heard::End(why, _) => why,
        };
        if at < items.len() {
            tally.count(&items[at], &Said::Fails(why));
        }
        return Ok(at + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Runs items in shells: `script` with the first item as `$0`.
    fn shells(items: usize, script: &str) -> Tally {
        let spec = crate::cases::tiny(1);
        let item = |number: usize| Item {
            name: format!("item {number}"),
            spec: spec.clone(),
            training: None,
            run: Box::new(|_| true),
        };
        let items: Vec<Item> = (0..items).map(item).collect();
        let options = Options {
            suite: Suite::Training,
            place: Place {
                device: String::new(),
                store: PathBuf::new(),
            },
            data: PathBuf::new(),
            tiny: true,
            here: false,
            from: 0,
            each: 3,
            seconds: 100,
        };
        let start = |first: usize| {
            Process::start(Command::new("sh").args(["-c", script, &first.to_string()]))
        };
        watched(&options, &items, start).unwrap()
    }

    /// One that crashes, aborts or hangs fails, and the others run.
    #[test]
    fn an_item_that_ends_its_process_costs_itself_alone() {
        let script = r#"
            i=$0
            while [ $i -lt 6 ]; do
                echo "begun $i"
                case $i in
                    1) kill -s SEGV $$ ;;
                    2) exec sleep 100 ;;
                    4) kill -s ABRT $$ ;;
                esac
                echo "agrees 5"
                i=$((i + 1))
            done"#;
        let expected = Tally {
            agree: 3,
            failed: 3,
            ..Tally::default()
        };
        assert_eq!(shells(6, script), expected);
    }

    /// What crashes before the first item is no suite that was only cut.
    #[test]
    fn processes_that_end_before_they_begin_are_failures() {
        let tally = shells(100, "kill -s SEGV $$");
        assert_eq!((tally.agree, tally.failed), (0, LOST + 1));
        assert_eq!(tally.left, 99 - LOST);
    }

    #[test]
    fn what_a_process_says_reads_back() {
        for said in [
            Said::Begun(3),
            Said::Agrees(Duration::from_micros(12)),
            Said::Others,
            Said::Fails("y\n\\n is \\ 1".to_string()),
            Said::Absent("no driver".to_string()),
        ] {
            assert_eq!(Said::read(&said.line()), Some(said));
        }
        assert_eq!(Said::read("something else"), None);
    }
}
