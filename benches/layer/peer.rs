//! A peer: a child process that obeys lines. benches/peers/README.md has them.

use crate::Result;
use crate::pass::Pass;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// A running peer.
pub struct Peer {
    pub name: String,
    child: Child,
    lines: BufReader<ChildStdout>,
    orders: ChildStdin,
}

/// One variant in which a peer can run the layer.
#[derive(Clone)]
pub struct Variant {
    /// Index of the peer.
    pub peer: usize,
    /// The peer's word for it.
    pub name: String,
    /// For people: `torch-eager`.
    pub title: String,
}

impl Peer {
    /// Starts `command` and waits for its first line; also the title that it gives itself.
    ///
    /// # Errors
    /// When it cannot be started, or says why it cannot run.
    pub fn spawn(name: &str, command: &mut Command) -> Result<(Peer, String)> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn()?;
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        let orders = child.stdin.take().expect("piped");
        let name = name.to_string();
        let mut peer = Peer {
            name,
            child,
            lines,
            orders,
        };
        let title = peer.answer("ready")?.join(" ");
        Ok((peer, title))
    }

    /// Reads `folder`; the variants that can run the pass. A line when there is none.
    pub fn load(&mut self, index: usize, folder: &Path, pass: Pass) -> Vec<Variant> {
        let words = match self.ask(&format!("load {}", folder.display())) {
            Ok(words) => words,
            Err(problem) => {
                println!("# {} is left out: {problem}", self.name);
                return Vec::new();
            }
        };
        let can = words.iter().filter_map(|word| {
            let (name, most) = word.split_once(':')?;
            (pass == Pass::Forward || most == "both").then(|| name.to_string())
        });
        let variant = |name: String| Variant {
            peer: index,
            title: match name.as_str() {
                "layer" => self.name.clone(),
                _ => format!("{}-{name}", self.name),
            },
            name,
        };
        can.map(variant).collect()
    }

    /// Nanoseconds of each of `count` calls.
    pub fn run(&mut self, variant: &Variant, pass: Pass, count: usize) -> Result<Vec<Duration>> {
        let words = self.ask(&format!("run {} {pass} {count}", variant.name))?;
        let time = |word: &String| Ok(Duration::from_nanos(word.parse()?));
        words.iter().map(time).collect()
    }

    /// The words after `ok`.
    ///
    /// # Errors
    /// The reason after `no`, or that the process has ended.
    pub fn ask(&mut self, order: &str) -> Result<Vec<String>> {
        writeln!(self.orders, "{order}")?;
        self.orders.flush()?;
        self.answer("ok")
    }

    fn answer(&mut self, good: &str) -> Result<Vec<String>> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        match words.next() {
            Some(word) if word == good => Ok(words.map(str::to_string).collect()),
            Some("no") => Err(words.collect::<Vec<_>>().join(" ").into()),
            _ => Err("it ended".into()),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
