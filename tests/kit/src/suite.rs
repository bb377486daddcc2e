//! Runs the items of a suite in a process of their own, so that a kernel that hangs or
//! breaks the device costs one item and not the rest.

use crate::commands::Place;
use crate::items::{Item, Suite};
use crate::open::Absent;
use crate::{ABSENT, CUT, Result};
use clap::Args;
use moesaic::Engine;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
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

/// Processes that may be lost before the suite is given up.
const LOST: usize = 20;

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
        here(options, &items)
    } else {
        watched(options, &items)
    }
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
            tell(&Said::Absent(error.to_string()));
            return Ok(ExitCode::from(ABSENT));
        }
    };
    let mut failed = false;
    for (number, item) in items.iter().enumerate().skip(options.from) {
        tell(&Said::Begun(number));
        let said = one(item, &engine);
        tell(&said);
        if matches!(said, Said::Fails(_)) {
            failed = true;
            if engine.device().synchronize().is_err() {
                return Ok(ExitCode::from(BROKEN as u8));
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

/// A line that whoever watches sees at once.
fn tell(said: &Said) {
    println!("{}", said.line());
    // Nobody is there to be told.
    let _ = std::io::stdout().flush();
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
#[derive(Default)]
struct Tally {
    agree: usize,
    others: usize,
    failed: usize,
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

fn watched(options: &Options, items: &[Item]) -> Result<ExitCode> {
    let end = Instant::now() + Duration::from_secs(options.seconds);
    let mut tally = Tally::default();
    let (mut next, mut lost) = (options.from, 0);
    while next < items.len() && lost <= LOST && Instant::now() < end {
        let mut process = Process::start(options, next)?;
        match process.follow(options, items, next, end, &mut tally) {
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
    let left = items.len().saturating_sub(next);
    let Tally {
        agree,
        others,
        failed,
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
    Ok(ExitCode::from(match (failed, left) {
        _ if strange => 1,
        (0, 0) => 0,
        (0, _) => CUT,
        _ => 1,
    }))
}

/// A process that runs items.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(options: &Options, from: usize) -> Result<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        let arguments: Vec<_> = std::env::args_os().skip(1).collect();
        command.args(arguments).arg("--here");
        // The last word counts.
        if from > options.from {
            command.args(["--from", &from.to_string()]);
        }
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let pipe = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = pipe.lines().map_while(std::result::Result::ok);
            lines
                .map(|line| sender.send(line))
                .take_while(|sent| sent.is_ok())
                .count()
        });
        Ok(Process { child, lines })
    }

    /// Reads what it says until it ends, hangs or time is up; the item to go on with.
    fn follow(
        &mut self,
        options: &Options,
        items: &[Item],
        first: usize,
        end: Instant,
        tally: &mut Tally,
    ) -> Result<usize> {
        let mut at = first;
        let mut under_way = false;
        loop {
            // A process that starts loads the driver, which takes its time.
            let patience = Duration::from_secs(options.each);
            let why = match self.lines.recv_timeout(patience) {
                Ok(line) => match Said::read(&line) {
                    Some(Said::Absent(why)) => return Err(Absent(why).into()),
                    Some(Said::Begun(item)) => {
                        (at, under_way) = (item, true);
                        if Instant::now() > end {
                            return Ok(at);
                        }
                        continue;
                    }
                    Some(said) => {
                        tally.count(&items[at], &said);
                        (at, under_way) = (at + 1, false);
                        continue;
                    }
                    None => continue,
                },
                Err(RecvTimeoutError::Timeout) => format!("no end after {} s", options.each),
                Err(RecvTimeoutError::Disconnected) if !under_way => return Ok(at),
                Err(RecvTimeoutError::Disconnected) => {
                    format!("the process ended: {}", self.child.wait()?)
                }
            };
            if at < items.len() {
                tally.count(&items[at], &Said::Fails(why));
            }
            return Ok(at + 1);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::Said;
    use std::time::Duration;

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
