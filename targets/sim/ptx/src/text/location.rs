//! Lines of the kernel's source, from `.loc` directives.

use std::collections::HashMap;

/// A place in the source: the innermost line first, then the line at which that
/// function was inlined, and so on out to the kernel.
pub type Frames = Vec<u32>;

/// Every place that the text names. Place 0 is "unknown".
#[derive(Clone, Debug)]
pub struct Locations {
    places: Vec<Frames>,
    /// The place at which the function around (line, column) was inlined, by
    /// the latest `.loc`.
    inlined: HashMap<(u32, u32), (u32, u32)>,
    current: u32,
}

impl Default for Locations {
    fn default() -> Locations {
        Locations {
            places: vec![Vec::new()],
            inlined: HashMap::new(),
            current: 0,
        }
    }
}

impl Locations {
    /// Forgets the current place, at the start of a kernel.
    pub fn restart(&mut self) {
        self.current = 0;
        self.inlined.clear();
    }

    /// Takes one `.loc`: line, column, and the place of the inlining.
    pub fn enter(&mut self, at: (u32, u32), caller: Option<(u32, u32)>) {
        match caller {
            Some(caller) => self.inlined.insert(at, caller),
            None => self.inlined.remove(&at),
        };
        let mut frames = vec![at.0];
        let mut next = caller;
        while let Some(frame) = next {
            frames.push(frame.0);
            // A chain longer than this is a cycle: a function that seems to be
            // inlined in itself.
            next = self.inlined.get(&frame).copied();
            if frames.len() == 16 {
                break;
            }
        }
        self.current = if self.places.last() == Some(&frames) {
            self.places.len() as u32 - 1
        } else {
            self.places.push(frames);
            self.places.len() as u32 - 1
        };
    }

    /// Returns the place of the next instruction.
    pub fn current(&self) -> u32 {
        self.current
    }

    /// Returns the lines of a place, innermost first; empty when unknown.
    pub fn frames(&self, place: u32) -> &[u32] {
        self.places.get(place as usize).map_or(&[], Vec::as_slice)
    }
}
