//! What of a pass is in one piece of it.

use moesaic_plan::{Cut, Parallel, Piece};

/// Parts of what a whole pass has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part {
    /// Of the rows that other ranks get.
    pub others: f64,
    /// Of the messages.
    pub peers: f64,
    /// Of the rows that a rank has for itself.
    pub own: f64,
    /// Of the rows that are multiplied.
    pub products: f64,
    /// For how many parts of it products are launched: more than one where the other pass
    /// has other pieces.
    pub launches: usize,
}

impl Part {
    pub const WHOLE: Part = Part {
        others: 1.0,
        peers: 1.0,
        own: 1.0,
        products: 1.0,
        launches: 1,
    };

    /// The pieces of a pass over a mesh in which rows go to `ways` slices; products are
    /// launched for `launched` pieces. By [`Cut::Ranks`] rows are taken to be spread evenly
    /// over distances.
    pub fn all((of, launched): (usize, usize), cut: Cut, mesh: Parallel, ways: usize) -> Vec<Part> {
        let groups = if ways == 0 { 1 } else { mesh.ep };
        let part = |number: usize| {
            let piece = Piece { number, of, cut };
            Part {
                launches: piece.units(launched).len(),
                ..Part::of(piece, groups, mesh.shards)
            }
        };
        (0..of).map(part).collect()
    }

    /// Of the rows that are multiplied those of one launch.
    pub fn launched(&self) -> f64 {
        self.products / self.launches.max(1) as f64
    }

    fn of(piece: Piece, groups: usize, shards: usize) -> Part {
        if piece.cut == Cut::Rows {
            let part = 1.0 / piece.of as f64;
            return Part {
                others: part,
                own: part,
                products: part,
                ..Part::WHOLE
            };
        }
        let distances = piece.distances(groups);
        let own = usize::from(distances.contains(&0));
        let others = distances.len() * shards - own;
        let of_all = others as f64 / (groups * shards - 1).max(1) as f64;
        Part {
            others: of_all,
            peers: of_all,
            own: own as f64,
            products: distances.len() as f64 / groups as f64,
            launches: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_make_up_the_whole() {
        for (ep, shards, ways) in [(1, 1, 1), (4, 1, 1), (7, 2, 2), (4, 2, 0)] {
            let mesh = Parallel {
                ep,
                shards,
                ..Parallel::default()
            };
            for cut in [Cut::Rows, Cut::Ranks] {
                for of in [1, 2, 4, 8] {
                    let parts = Part::all((of, of), cut, mesh, ways);
                    let sum = |part: fn(&Part) -> f64| parts.iter().map(part).sum::<f64>();
                    assert!((sum(|part| part.products) - 1.0).abs() < 1e-12);
                    assert!((sum(|part| part.own) - 1.0).abs() < 1e-12);
                    if ways > 0 && ep * shards > 1 {
                        assert!((sum(|part| part.others) - 1.0).abs() < 1e-12);
                    }
                }
            }
        }
    }

    /// The first piece is what a rank has for itself, and every message is in one piece.
    #[test]
    fn pieces_by_ranks_have_a_part_of_the_messages() {
        let mesh = Parallel {
            ep: 4,
            ..Parallel::default()
        };
        let parts = Part::all((4, 4), Cut::Ranks, mesh, 1);
        let peers: Vec<f64> = parts.iter().map(|part| 3.0 * part.peers).collect();
        assert_eq!(peers, [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(parts[0].own, 1.0);
        let by_rows = Part::all((4, 4), Cut::Rows, mesh, 1);
        assert!(by_rows.iter().all(|part| part.peers == 1.0));
    }

    /// With `degree=2/4` forward launches the pieces of backward.
    #[test]
    fn a_piece_is_launched_in_the_parts_that_both_passes_have() {
        let mesh = Parallel::default();
        let launches = |of, cut, launched| -> Vec<usize> {
            let parts = Part::all((of, launched), cut, mesh, 1);
            parts.iter().map(|part| part.launches).collect()
        };
        assert_eq!(launches(2, Cut::Rows, 4), [2, 2]);
        assert_eq!(launches(1, Cut::Rows, 4), [4]);
        assert_eq!(launches(4, Cut::Rows, 4), [1; 4]);
        // The first piece is the same in both passes; seven others make up three.
        assert_eq!(launches(4, Cut::Ranks, 22), [1, 7, 7, 7]);
        assert_eq!(Part::all((1, 4), Cut::Rows, mesh, 1)[0].launched(), 0.25);
    }
}
