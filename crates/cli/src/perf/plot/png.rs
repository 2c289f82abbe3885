//! A drawing as PNG.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

use super::drawing::{Anchor, Colour, Drawing, Font, Mark, Shape};

/// Pixels per unit of the drawing, with which the raster fonts have the sizes of
/// [`Font::size`].
const SCALE: f64 = 1.5;
/// Pixel density, with which 96 units are an inch.
const PIXELS_PER_METRE: u32 = (96.0 * SCALE / 0.0254) as u32;
/// Maximum width and height in pixels.
const MAX_SIDE: usize = 4096;

/// Returns the bytes of the file.
pub fn encode(drawing: &Drawing) -> Vec<u8> {
    let mut canvas = Canvas::new(drawing.width, drawing.height);
    for shape in &drawing.shapes {
        canvas.shape(shape);
    }
    canvas.to_file()
}

/// Rows of red, green and blue pixels.
struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<[u8; 3]>,
}

impl Canvas {
    fn new(width: f64, height: f64) -> Self {
        let pixels = |units: f64| ((units * SCALE).ceil() as usize).clamp(1, MAX_SIDE);
        let (width, height) = (pixels(width), pixels(height));
        Self {
            width,
            height,
            pixels: vec![[0xff; 3]; width * height],
        }
    }

    /// Blends a colour into a pixel, with `share` as opacity.
    fn blend(&mut self, x: usize, y: usize, share: f64, Colour(red, green, blue): Colour) {
        if x >= self.width {
            return;
        }
        let Some(pixel) = self.pixels.get_mut(y * self.width + x) else {
            return;
        };
        for (old, new) in pixel.iter_mut().zip([red, green, blue]) {
            let (from, to) = (f64::from(*old), f64::from(new));
            *old = (from + (to - from) * share.clamp(0.0, 1.0)).round() as u8;
        }
    }

    /// Fills the pixels of a box whose distance from the shape is negative, with smooth
    /// edges.
    fn fill(
        &mut self,
        (left, top): (f64, f64),
        (right, bottom): (f64, f64),
        colour: Colour,
        distance: impl Fn(f64, f64) -> f64,
    ) {
        let cells = |low: f64, high: f64, size: usize| {
            let cell = |at: f64| at.clamp(0.0, size as f64) as usize;
            cell(low - 1.0)..cell(high + 2.0)
        };
        for y in cells(top, bottom, self.height) {
            for x in cells(left, right, self.width) {
                let outside = distance(x as f64 + 0.5, y as f64 + 0.5);
                if outside < 0.5 {
                    self.blend(x, y, 0.5 - outside, colour);
                }
            }
        }
    }

    fn shape(&mut self, shape: &Shape) {
        let scaled = |at: (f64, f64)| (at.0 * SCALE, at.1 * SCALE);
        match shape {
            Shape::Line {
                points,
                width,
                colour,
            } => {
                for pair in points.windows(2) {
                    if let [from, to] = pair {
                        self.line(scaled(*from), scaled(*to), width * SCALE, *colour);
                    }
                }
            }
            Shape::Mark { at, mark, colour } => {
                let (at, radius) = (scaled(*at), mark.radius() * SCALE);
                let outline = SCALE / 2.0;
                self.mark(at, *mark, radius + outline, Colour(0xff, 0xff, 0xff));
                self.mark(at, *mark, radius - outline, *colour);
            }
            Shape::Text {
                at,
                anchor,
                font,
                colour,
                text,
            } => self.text(scaled(*at), *anchor, *font, *colour, text),
        }
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), width: f64, colour: Colour) {
        let half = width / 2.0;
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let square = dx * dx + dy * dy;
        let low = (from.0.min(to.0) - half, from.1.min(to.1) - half);
        let high = (from.0.max(to.0) + half, from.1.max(to.1) + half);
        self.fill(low, high, colour, |x, y| {
            let (x, y) = (x - from.0, y - from.1);
            let along = if square > 0.0 {
                ((x * dx + y * dy) / square).clamp(0.0, 1.0)
            } else {
                0.0
            };
            (x - along * dx).hypot(y - along * dy) - half
        });
    }

    fn mark(&mut self, at: (f64, f64), mark: Mark, radius: f64, colour: Colour) {
        let low = (at.0 - radius, at.1 - radius);
        let high = (at.0 + radius, at.1 + radius);
        self.fill(low, high, colour, |x, y| {
            let (x, y) = ((x - at.0).abs(), (y - at.1).abs());
            match mark {
                Mark::Circle => x.hypot(y) - radius,
                Mark::Square => x.max(y) - radius,
                Mark::Diamond => (x + y - radius) * std::f64::consts::FRAC_1_SQRT_2,
            }
        });
    }

    fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, font: Font, colour: Colour, text: &str) {
        let weight = match font.is_bold() {
            true => FontWeight::Bold,
            false => FontWeight::Regular,
        };
        let height = match font {
            Font::Title => RasterHeight::Size32,
            Font::Bold | Font::Label => RasterHeight::Size24,
            Font::Small => RasterHeight::Size20,
        };
        let advance = get_raster_width(weight, height);
        let width = (advance * text.chars().count()) as f64;
        let left = match anchor {
            Anchor::Start => x,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width,
        };
        let top = (y - base_line(weight, height)).round().max(0.0) as usize;
        let mut at = left.round().max(0.0) as usize;
        for c in text.chars() {
            let glyph = get_raster(c, weight, height).or_else(|| get_raster('?', weight, height));
            for (row, line) in glyph.iter().flat_map(|glyph| glyph.rows().enumerate()) {
                for (column, ink) in line.iter().enumerate().filter(|(_, ink)| **ink > 0) {
                    let share = f64::from(*ink) / 255.0;
                    self.blend(at + column, top + row, share, colour);
                }
            }
            at += advance;
        }
    }

    /// Returns the file's bytes: signature, header, density, pixels, end.
    fn to_file(&self) -> Vec<u8> {
        let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
        let mut header = Vec::new();
        header.extend((self.width as u32).to_be_bytes());
        header.extend((self.height as u32).to_be_bytes());
        // 8 bits each of red, green and blue; deflate; filters; not interlaced.
        header.extend([8, 2, 0, 0, 0]);
        chunk(&mut out, *b"IHDR", &header);
        let mut density = [PIXELS_PER_METRE.to_be_bytes(); 2].concat();
        density.push(1);
        chunk(&mut out, *b"pHYs", &density);
        let mut rows = Vec::with_capacity(self.height * (1 + 3 * self.width));
        for row in self.pixels.chunks_exact(self.width) {
            // Filter type 0: none.
            rows.push(0);
            rows.extend(row.as_flattened());
        }
        let rows = miniz_oxide::deflate::compress_to_vec_zlib(&rows, 6);
        chunk(&mut out, *b"IDAT", &rows);
        chunk(&mut out, *b"IEND", &[]);
        out
    }
}

/// Returns the distance of the base line from the top of a character's box.
fn base_line(weight: FontWeight, height: RasterHeight) -> f64 {
    let glyph = get_raster('H', weight, height);
    let ink = glyph.and_then(|glyph| {
        let rows: Vec<_> = glyph.rows().collect();
        rows.iter()
            .rposition(|row| row.iter().any(|ink| *ink > 127))
    });
    ink.map_or(0.0, |row| row as f64 + 1.0)
}

fn chunk(out: &mut Vec<u8>, name: [u8; 4], data: &[u8]) {
    out.extend((data.len() as u32).to_be_bytes());
    let start = out.len();
    out.extend(name);
    out.extend(data);
    let checked = out.get(start..).unwrap_or_default();
    let crc = crc32fast::hash(checked);
    out.extend(crc.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pixels of a drawing of 100 by 60 units.
    fn canvas(shapes: impl FnOnce(&mut Drawing)) -> Canvas {
        let mut drawing = Drawing::new(100.0);
        drawing.height = 60.0;
        shapes(&mut drawing);
        let mut canvas = Canvas::new(drawing.width, drawing.height);
        drawing.shapes.iter().for_each(|shape| canvas.shape(shape));
        canvas
    }

    fn dark_pixels(canvas: &Canvas) -> Vec<(usize, usize)> {
        let dark = |(at, pixel): (usize, &[u8; 3])| {
            (pixel[0] < 128).then_some((at % canvas.width, at / canvas.width))
        };
        canvas.pixels.iter().enumerate().filter_map(dark).collect()
    }

    const BLACK: Colour = Colour(0, 0, 0);

    #[test]
    fn file_contains_the_pixels() {
        let canvas = canvas(|drawing| drawing.line(vec![(0.0, 0.0), (100.0, 60.0)], 3.0, BLACK));
        let file = canvas.to_file();
        let mut rest = file.strip_prefix(b"\x89PNG\r\n\x1a\n").unwrap();
        let mut names = Vec::new();
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let length = u32::from_be_bytes(*length) as usize;
            let (checked, after) = after.split_at(4 + length);
            let (crc, after) = after.split_first_chunk::<4>().unwrap();
            assert_eq!(crc32fast::hash(checked), u32::from_be_bytes(*crc));
            let (name, data) = checked.split_at(4);
            names.push(String::from_utf8(name.to_vec()).unwrap());
            match name {
                b"IHDR" => assert_eq!(data, [0, 0, 0, 150, 0, 0, 0, 90, 8, 2, 0, 0, 0]),
                b"IDAT" => {
                    let rows = miniz_oxide::inflate::decompress_to_vec_zlib(data).unwrap();
                    let pixels: Vec<u8> = rows
                        .chunks_exact(1 + 3 * 150)
                        .flat_map(|row| row[1..].to_vec())
                        .collect();
                    assert_eq!(pixels, canvas.pixels.as_flattened());
                }
                _ => {}
            }
            rest = after;
        }
        assert_eq!(names, ["IHDR", "pHYs", "IDAT", "IEND"]);
    }

    #[test]
    fn lines_and_marks_have_their_positions() {
        let line = canvas(|drawing| drawing.line(vec![(10.0, 20.0), (50.0, 20.0)], 4.0, BLACK));
        let pixels = dark_pixels(&line);
        assert!(pixels.contains(&(45, 30)) && !pixels.contains(&(45, 36)));
        assert!(pixels.iter().all(|(x, _)| (10..=80).contains(x)));
        for mark in [Mark::Circle, Mark::Square, Mark::Diamond] {
            let marked = dark_pixels(&canvas(|drawing| drawing.mark((40.0, 30.0), mark, BLACK)));
            assert!(marked.contains(&(60, 45)), "{mark:?}");
            assert!(
                marked
                    .iter()
                    .all(|(x, y)| x.abs_diff(60) < 9 && y.abs_diff(45) < 9)
            );
        }
        // Shapes partly or entirely outside are clipped.
        canvas(|drawing| drawing.line(vec![(-50.0, -9.0), (500.0, 900.0)], 4.0, BLACK));
        canvas(|drawing| drawing.mark((-9.0, 1e9), Mark::Circle, BLACK));
    }

    #[test]
    fn texts_are_on_their_base_line_and_anchored() {
        let text = |anchor| {
            dark_pixels(&canvas(|drawing| {
                drawing.text((50.0, 30.0), anchor, Font::Label, BLACK, "HHµ?\u{4e00}");
            }))
        };
        let (start, end) = (text(Anchor::Start), text(Anchor::End));
        assert!(start.iter().all(|(x, _)| *x >= 75));
        assert!(end.iter().all(|(x, _)| *x < 75));
        // The letters without a descender.
        let lowest = start
            .iter()
            .filter(|(x, _)| *x < 75 + 22)
            .map(|at| at.1)
            .max();
        assert_eq!(lowest, Some(44));
    }
}
