//! Output of many ranks, merged line by line.

use std::io::Write;

/// Length in bytes from which a line goes out in parts.
const LONGEST: usize = 64 << 10;
/// Bytes that a ready pipe takes without blocking its writer: POSIX `PIPE_BUF` on Linux.
const AT_ONCE: usize = 4096;
/// Unwritten bytes at which the launcher stops reading from ranks.
const FULL: usize = 1 << 20;

/// The unfinished last line of one stream of a rank.
#[derive(Default)]
pub struct Line(Vec<u8>);

impl Line {
    /// Adds bytes, and moves whole lines to `out` behind `prefix`.
    pub fn add(&mut self, bytes: &[u8], prefix: &str, out: &mut Queue) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.0.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.0.len() >= LONGEST {
                self.end(prefix, out);
            }
        }
    }

    /// Moves the last line, which may lack its end.
    pub fn end(&mut self, prefix: &str, out: &mut Queue) {
        if self.0.is_empty() {
            return;
        }
        if !self.0.ends_with(b"\n") {
            self.0.push(b'\n');
        }
        out.push(prefix.as_bytes(), &self.0);
        self.0.clear();
    }
}

/// Lines waiting to be written to one of this process's streams.
#[derive(Default)]
pub struct Queue {
    bytes: Vec<u8>,
    /// Number of bytes at the front that are already written.
    written: usize,
    /// Whether the reader of the stream has gone.
    pub closed: bool,
}

impl Queue {
    fn push(&mut self, prefix: &[u8], line: &[u8]) {
        if !self.closed {
            self.bytes.extend_from_slice(prefix);
            self.bytes.extend_from_slice(line);
        }
    }

    /// Adds a line from the launcher itself.
    pub fn say(&mut self, text: &str) {
        self.push(text.as_bytes(), b"\n");
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.bytes.len() - self.written > FULL
    }

    /// Returns whether the last write ended inside a line.
    pub fn inside_line(&self) -> bool {
        self.written > 0 && self.bytes[self.written - 1] != b'\n'
    }

    /// Writes as much as the stream takes without blocking. The caller knows that it is ready.
    pub fn write(&mut self, stream: &mut dyn Write) {
        let end = self.bytes.len().min(self.written + AT_ONCE);
        let piece = &self.bytes[self.written..end];
        // Write whole lines only, unless a single line is longer than the limit.
        let lines = piece.iter().rposition(|byte| *byte == b'\n');
        let piece = &piece[..lines.map_or(piece.len(), |last| last + 1)];
        match stream.write(piece).and_then(|n| stream.flush().map(|()| n)) {
            Ok(count) => self.written += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => self.closed = true,
        }
        if self.closed || self.written == self.bytes.len() {
            self.bytes.clear();
            self.written = 0;
        } else if self.written > FULL {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the queue, at most four kilobytes at a time, and returns what came out.
    fn written(queue: &mut Queue) -> String {
        let mut out = Vec::new();
        while !queue.is_empty() {
            queue.write(&mut out);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lines_of_ranks_stay_whole() {
        let (mut one, mut two, mut queue) = (Line::default(), Line::default(), Queue::default());
        one.add(b"a b", "[1] ", &mut queue);
        two.add(b"x\ny", "[2] ", &mut queue);
        one.add(b" c\n\n", "[1] ", &mut queue);
        two.end("[2] ", &mut queue);
        two.end("[2] ", &mut queue);
        assert_eq!(written(&mut queue), "[2] x\n[1] a b c\n[1] \n[2] y\n");
    }

    #[test]
    fn a_line_without_end_goes_out_in_parts() {
        let (mut line, mut queue) = (Line::default(), Queue::default());
        for _ in 0..9 {
            line.add(&[b'z'; 10_000], "", &mut queue);
        }
        let text = written(&mut queue);
        assert_eq!(text.len(), 70_000 + 1);
        line.end("", &mut queue);
        assert_eq!(written(&mut queue).len(), 20_000 + 1);
    }

    #[test]
    fn a_long_line_is_known_to_be_under_way() {
        let mut queue = Queue::default();
        queue.say("short");
        queue.say(&"y".repeat(10_000));
        let mut out = Vec::new();
        queue.write(&mut out);
        assert_eq!(out, b"short\n");
        assert!(!queue.inside_line());
        queue.write(&mut out);
        assert!(queue.inside_line());
        let rest = written(&mut queue);
        assert!(rest.ends_with("y\n") && !queue.inside_line());
    }

    #[test]
    fn what_nobody_reads_is_dropped() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut queue = Queue::default();
        queue.say("a");
        queue.write(&mut Gone);
        queue.say("b");
        assert!(queue.closed && queue.is_empty());
    }
}
