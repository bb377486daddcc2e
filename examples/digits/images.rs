//! The handwritten digits: see examples/data/README.md.

use moesaic::reference::Random;

const RECORDS: &[u8] = include_bytes!("../data/digits.bin");
/// Pixels of an image: 8 rows of 8.
pub const PIXELS: usize = 64;

/// Images as rows, with their labels.
#[derive(Clone, Default)]
pub struct Images {
    /// `[count, 64]`, 0 to 1.
    pub pixels: Vec<f32>,
    /// `[count]`, 0 to 9.
    pub labels: Vec<usize>,
}

impl Images {
    /// Loads the images and splits them in file order: four fifths for training, the rest for
    /// testing. Neighbours in the file are often by one writer, so this split is harder and fairer
    /// than a random one.
    pub fn load() -> (Images, Images) {
        let records: Vec<&[u8]> = RECORDS.chunks_exact(PIXELS + 1).collect();
        let (train, test) = records.split_at(records.len() * 4 / 5);
        (Images::from_records(train), Images::from_records(test))
    }

    fn from_records(records: &[&[u8]]) -> Images {
        let pixels = records.iter().flat_map(|record| &record[..PIXELS]);
        Images {
            pixels: pixels.map(|v| f32::from(*v) / 16.0).collect(),
            labels: records.iter().map(|r| r[PIXELS] as usize).collect(),
        }
    }

    /// Returns batches of up to `size` in a random order, with each image moved by up to one pixel.
    /// There are few images, and a moved digit is the same digit.
    pub fn shuffled(&self, size: usize, random: &mut Random) -> Vec<Images> {
        let mut order: Vec<(u64, usize)> =
            (0..self.labels.len()).map(|i| (random.bits(), i)).collect();
        order.sort_unstable();
        order
            .chunks(size)
            .map(|part| {
                let mut batch = Images::default();
                for (bits, i) in part {
                    let shift = ((bits % 3) as isize - 1, (bits / 3 % 3) as isize - 1);
                    batch.labels.push(self.labels[*i]);
                    let image = &self.pixels[i * PIXELS..][..PIXELS];
                    batch.pixels.extend(moved(image, shift));
                }
                batch
            })
            .collect()
    }
}

fn moved(image: &[f32], (down, right): (isize, isize)) -> impl Iterator<Item = f32> {
    (0..PIXELS as isize).map(move |i| {
        let (row, column) = (i / 8 - down, i % 8 - right);
        let inside = (0..8).contains(&row) && (0..8).contains(&column);
        if inside {
            image[(row * 8 + column) as usize]
        } else {
            0.0
        }
    })
}
