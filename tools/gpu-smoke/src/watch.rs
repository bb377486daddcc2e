//! Processes that are watched: a kernel that hangs or breaks the device costs the piece of
//! work it is in, by name, and the next process goes on behind that.

use crate::Result;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Processes that may be lost before the rest is given up.
pub const LOST: usize = 20;

/// How long a process may go on after the end, in a piece that it began before.
const AFTER_END: Duration = Duration::from_secs(5);

/// A process whose lines are heard.
pub struct Process {
    child: Child,
    lines: Receiver<String>,
}

/// What comes of a process.
pub enum Heard {
    Line(String),
    /// Nothing, for so long.
    Silence(Duration),
    /// It ended, and how.
    End(String, Option<i32>),
}

/// This program with the words it was started with, to run here what it was to watch.
///
/// # Errors
/// When it has no path.
pub fn again() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--here");
    Ok(command)
}

impl Process {
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Process> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
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

    /// The next line, waited for so long, and not much longer than to the end of all.
    ///
    /// # Errors
    /// When the process cannot be asked how it ended.
    pub fn hear(&mut self, each: Duration, end: Instant) -> Result<Heard> {
        let left = end.saturating_duration_since(Instant::now());
        let patience = each.min(left + AFTER_END);
        Ok(match self.lines.recv_timeout(patience) {
            Ok(line) => Heard::Line(line),
            Err(RecvTimeoutError::Timeout) => Heard::Silence(patience),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait()?;
                Heard::End(format!("the process ended: {status}"), status.code())
            }
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says a line that whoever watches hears at once.
pub fn say(line: &str) {
    println!("{line}");
    // Nobody is there to be told.
    let _ = std::io::stdout().flush();
}

/// Numbers of something, such as lines that failed.
pub type Counts = [usize; 4];

/// What a process says to its watcher; everything else is for people.
#[derive(Debug, PartialEq)]
pub enum Word {
    /// A piece of work begins.
    Begun(usize),
    /// What came of it, before the next.
    Counts(Counts),
    /// The device is broken: another process has to go on.
    Again,
    /// No piece is left.
    Done,
}

impl Word {
    pub fn say(&self) {
        say(&match self {
            Word::Begun(piece) => format!("@begun {piece}"),
            Word::Counts([a, b, c, d]) => format!("@counts {a} {b} {c} {d}"),
            Word::Again => "@again".to_string(),
            Word::Done => "@done".to_string(),
        });
    }

    fn read(line: &str) -> Option<Word> {
        let mut words = line.strip_prefix('@')?.split(' ');
        let word = words.next()?;
        let numbers: Vec<usize> = words.map_while(|word| word.parse().ok()).collect();
        match (word, &numbers[..]) {
            ("begun", [piece]) => Some(Word::Begun(*piece)),
            ("counts", numbers) => Some(Word::Counts(numbers.try_into().ok()?)),
            ("again", []) => Some(Word::Again),
            ("done", []) => Some(Word::Done),
            _ => None,
        }
    }
}

/// Pieces of work, one after another.
pub struct Pieces {
    pub count: usize,
    /// How long a process may be silent.
    pub each: Duration,
    /// After which no process is started.
    pub end: Instant,
}

/// What came of them.
#[derive(Debug, Default, PartialEq)]
pub struct Came {
    pub counts: Counts,
    /// Pieces in which a process was lost.
    pub lost: Vec<usize>,
    /// Pieces that no process came to.
    pub left: usize,
    /// The exit code of a first process that ended before it began a piece.
    pub refused: Option<i32>,
}

/// How a process left its pieces.
enum Left {
    Done,
    /// This is the piece to go on with.
    Again(usize),
    /// It was lost in this piece.
    Lost(usize, String),
    Refused(i32),
}

impl Pieces {
    /// Runs all: `start` starts a process with a piece, `tell` has lines for people, `lost`
    /// hears of a piece that was not finished, and why.
    ///
    /// # Errors
    /// When no process can be started.
    pub fn run(
        &self,
        mut start: impl FnMut(usize, &Came) -> Result<Process>,
        mut tell: impl FnMut(&str),
        mut lost: impl FnMut(usize, &str),
    ) -> Result<Came> {
        let (mut next, mut came) = (0, Came::default());
        let mut processes = 0;
        while next < self.count && processes <= LOST && (next == 0 || Instant::now() < self.end) {
            let process = start(next, &came)?;
            processes += 1;
            match self.follow(process, next, &mut came, &mut tell)? {
                Left::Done => next = self.count,
                Left::Again(piece) => next = piece,
                Left::Lost(piece, why) => {
                    lost(piece, &why);
                    came.lost.push(piece);
                    next = piece + 1;
                }
                Left::Refused(code) => {
                    came.refused = Some(code);
                    break;
                }
            }
        }
        came.left = self.count.saturating_sub(next);
        Ok(came)
    }

    fn follow(
        &self,
        mut process: Process,
        first: usize,
        came: &mut Came,
        tell: &mut impl FnMut(&str),
    ) -> Result<Left> {
        let (mut at, mut begun) = (first, false);
        loop {
            let line = match process.hear(self.each, self.end)? {
                Heard::Line(line) => line,
                Heard::Silence(time) => {
                    let why = format!("no word for {} s", time.as_secs());
                    return Ok(Left::Lost(at, why));
                }
                Heard::End(_, Some(code)) if first == 0 && !begun => {
                    return Ok(Left::Refused(code));
                }
                Heard::End(why, _) => return Ok(Left::Lost(at, why)),
            };
            match Word::read(&line) {
                None => tell(&line),
                Some(Word::Begun(piece)) => (at, begun) = (piece, true),
                Some(Word::Counts(counts)) => {
                    (0..counts.len()).for_each(|i| came.counts[i] += counts[i]);
                    at += 1;
                }
                Some(Word::Again) => return Ok(Left::Again(at)),
                Some(Word::Done) => return Ok(Left::Done),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_says_reads_back() {
        assert_eq!(Word::read("@begun 3"), Some(Word::Begun(3)));
        assert_eq!(
            Word::read("@counts 1 0 2 3"),
            Some(Word::Counts([1, 0, 2, 3]))
        );
        assert_eq!(Word::read("@again"), Some(Word::Again));
        assert_eq!(Word::read("@done"), Some(Word::Done));
        assert_eq!(Word::read("@counts 1"), None);
        assert_eq!(Word::read("# a line"), None);
    }

    /// Runs pieces in shells: `script` with the first piece as `$0`.
    fn shells(count: usize, seconds: u64, script: &str) -> (Came, Vec<String>) {
        let pieces = Pieces {
            count,
            each: Duration::from_secs(3),
            end: Instant::now() + Duration::from_secs(seconds),
        };
        let (mut lines, mut ends) = (Vec::new(), Vec::new());
        let start = |first: usize, _: &Came| {
            Process::start(Command::new("sh").args(["-c", script, &first.to_string()]))
        };
        let tell = |line: &str| lines.push(line.to_string());
        let lost = |piece: usize, why: &str| ends.push(format!("{piece}: {why}"));
        let came = pieces.run(start, tell, lost).unwrap();
        lines.extend(ends);
        (came, lines)
    }

    /// A piece that breaks its process or hangs costs that piece, and its lines are there.
    #[test]
    fn pieces_go_on_behind_one_that_is_lost() {
        let script = r#"
            i=$0
            while [ $i -lt 6 ]; do
                echo "@begun $i"; echo "piece $i"
                case $i in
                    1) kill -s SEGV $$ ;;
                    2) exec sleep 100 ;;
                    3) echo "@counts 0 1 0 0"; echo "@again"; exit 3 ;;
                    4) kill -s ABRT $$ ;;
                esac
                echo "@counts 1 0 0 0"
                i=$((i + 1))
            done
            echo @done"#;
        let (came, lines) = shells(6, 100, script);
        assert_eq!(came.counts, [2, 1, 0, 0], "{lines:?}");
        assert_eq!((came.lost, came.left), (vec![1, 2, 4], 0));
        for piece in 0..6 {
            assert!(lines.contains(&format!("piece {piece}")), "{lines:?}");
        }
        let why = |part: &str| assert!(lines.iter().any(|line| line.contains(part)), "{lines:?}");
        why("1: the process ended: signal: 11");
        why("2: no word for ");
        why("4: the process ended: signal: 6");
    }

    #[test]
    fn pieces_end_with_the_time_and_with_a_process_that_cannot_begin() {
        let (came, _) = shells(4, 0, "echo @begun $0; exec sleep 100");
        assert_eq!((came.lost, came.left), (vec![0], 3));
        let (came, lines) = shells(4, 100, "echo no driver; exit 2");
        assert_eq!((came.refused, came.left), (Some(2), 4));
        assert_eq!(lines, ["no driver"]);
        let (came, _) = shells(100, 100, "kill -s SEGV $$");
        assert_eq!((came.lost.len(), came.left), (LOST + 1, 99 - LOST));
    }
}
