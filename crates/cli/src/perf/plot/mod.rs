//! Plots of latency and bandwidth over the message size.
//!
//! A [`drawing`] consists of lines, marks and texts; [`svg`] and [`png`] encode it.

mod axis;
mod drawing;
mod png;
mod svg;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use super::stats::Row;
use super::units;
use crate::escape::escaped;
use axis::{Axis, Ticks};
use drawing::{Anchor, Colour, Drawing, Font, Mark};

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 28.0;
const CHART_TOP: f64 = 112.0;
const CHART_HEIGHT: f64 = 320.0;
/// Width of the labels of the vertical axis.
const LABEL_WIDTH: f64 = 84.0;

const INK: Colour = Colour(0x22, 0x22, 0x22);
const GREY: Colour = Colour(0x66, 0x66, 0x66);
const GRID: Colour = Colour(0xe3, 0xe3, 0xe3);
// Colours of Okabe and Ito, which can be distinguished with any colour vision.
const BLUE: Colour = Colour(0x00, 0x72, 0xb2);
const VERMILION: Colour = Colour(0xd5, 0x5e, 0x00);
const GREEN: Colour = Colour(0x00, 0x9e, 0x73);

/// The reason why a plot was not written.
#[derive(Debug)]
pub enum PlotError {
    /// The file's name ends in neither `.svg` nor `.png`.
    Extension(String),
    /// The file could not be written.
    Write {
        /// The file.
        file: String,
        /// The reason.
        source: io::Error,
    },
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Extension(file) => write!(
                f,
                "plots are SVG or PNG files: the name {file} must end in .svg or .png"
            ),
            Self::Write { file, source } => write!(f, "writing the plot {file}: {source}"),
        }
    }
}

impl std::error::Error for PlotError {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Svg,
    Png,
}

/// The file for a plot, opened before the measurement so that errors are reported early.
#[derive(Debug)]
pub struct PlotFile {
    path: PathBuf,
    format: Format,
    file: File,
    /// Whether the file is new and empty: it is removed if no plot is written.
    empty: bool,
}

impl PlotFile {
    /// Opens or creates the file. An existing plot is kept until [`draw`](Self::draw).
    pub fn create(path: &Path) -> Result<Self, PlotError> {
        let extension = path.extension().map(|it| it.to_ascii_lowercase());
        let format = match extension.as_deref().and_then(|it| it.to_str()) {
            Some("svg") => Format::Svg,
            Some("png") => Format::Png,
            _ => return Err(PlotError::Extension(path.display().to_string())),
        };
        let mut options = OpenOptions::new();
        options.write(true);
        let (file, empty) = match options.clone().create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (options.open(path), false)
            }
            created => (created, true),
        };
        let file = file.map_err(|source| PlotError::Write {
            file: path.display().to_string(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            format,
            file,
            empty,
        })
    }

    /// Draws the rows into the file.
    pub fn draw(mut self, captions: &Captions, rows: &[Row]) -> Result<(), PlotError> {
        let drawing = paint(captions, rows);
        let bytes = match self.format {
            Format::Svg => svg::encode(&drawing).into_bytes(),
            Format::Png => png::encode(&drawing),
        };
        self.write(&bytes).map_err(|source| PlotError::Write {
            file: self.path.display().to_string(),
            source,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A pipe or terminal cannot be truncated.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
            self.file.rewind()?;
        }
        self.file.write_all(bytes)?;
        self.empty = false;
        Ok(())
    }
}

impl Drop for PlotFile {
    fn drop(&mut self) {
        if self.empty {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The texts around the charts.
#[derive(Clone, Debug)]
pub struct Captions {
    pub title: String,
    /// Whether the latency is half of a round trip.
    pub round_trip: bool,
    pub bidirectional: bool,
    /// The options.
    pub options: String,
    /// Device, host and program.
    pub conditions: String,
}

/// A curve: name, colour, mark, points.
type Curve = (&'static str, Colour, Mark, Vec<(f64, f64)>);

fn paint(captions: &Captions, rows: &[Row]) -> Drawing {
    let latency = match captions.round_trip {
        true => "Latency, half of the round trip",
        false => "Latency, from posting to completion",
    };
    let bandwidth = match captions.bidirectional {
        true => "Bandwidth of both directions",
        false => "Bandwidth",
    };
    let curve = |value: fn(&Row) -> f64| -> Vec<(f64, f64)> {
        let point = |row: &Row| (f64::from(row.size), value(row));
        rows.iter().map(point).collect()
    };
    let half = WIDTH / 2.0;
    let mut drawing = Drawing::new(WIDTH);
    let mut y = MARGIN + 12.0;
    drawing.text(
        (MARGIN, y),
        Anchor::Start,
        Font::Title,
        INK,
        &captions.title,
    );
    y += 24.0;
    for line in wrapped(&captions.options, Font::Label) {
        drawing.text((MARGIN, y), Anchor::Start, Font::Label, GREY, &line);
        y += 16.0;
    }
    chart(
        &mut drawing,
        (MARGIN, half - MARGIN / 2.0),
        latency,
        (Ticks::OneTwoFive, units::time),
        &[
            (
                "p99",
                VERMILION,
                Mark::Square,
                curve(|row| row.latency.p99 as f64),
            ),
            (
                "p50",
                BLUE,
                Mark::Circle,
                curve(|row| row.latency.p50 as f64),
            ),
        ],
    );
    chart(
        &mut drawing,
        (half + MARGIN / 2.0, WIDTH - MARGIN),
        bandwidth,
        (Ticks::PowersOfTwo, units::rate),
        &[(
            "",
            GREEN,
            Mark::Diamond,
            curve(|row| row.bandwidth.bytes_per_second),
        )],
    );
    let mut y = CHART_TOP + CHART_HEIGHT + 68.0;
    for line in wrapped(&captions.conditions, Font::Small) {
        drawing.text((MARGIN, y), Anchor::Start, Font::Small, GREY, &line);
        y += 14.0;
    }
    drawing.height = y - 14.0 + MARGIN;
    drawing
}

/// Draws a chart with logarithmic axes between two horizontal positions.
fn chart(
    drawing: &mut Drawing,
    (left, right): (f64, f64),
    title: &str,
    (ticks, format): (Ticks, fn(f64) -> String),
    curves: &[Curve],
) {
    drawing.text(
        (left, CHART_TOP - 14.0),
        Anchor::Start,
        Font::Bold,
        INK,
        title,
    );
    let has_names = curves.iter().any(|(name, ..)| !name.is_empty());
    let (left, end) = (left + LABEL_WIDTH, right);
    let right = end - if has_names { 34.0 } else { 10.0 };
    let bottom = CHART_TOP + CHART_HEIGHT;
    let points = || curves.iter().flat_map(|(.., points)| points);
    let size_axis = Axis::of(points().map(|point| point.0), Ticks::PowersOfTwo, 5);
    let value_axis = Axis::of(points().map(|point| point.1), ticks, 8);
    let x = |size: f64| left + 12.0 + (right - left - 12.0) * size_axis.position(size);
    let y = |value: f64| bottom - CHART_HEIGHT * value_axis.position(value);
    for tick in value_axis.ticks() {
        let at = y(tick);
        drawing.line(vec![(left, at), (end, at)], 1.0, GRID);
        drawing.text(
            (left - 8.0, at + 4.0),
            Anchor::End,
            Font::Label,
            GREY,
            &format(tick),
        );
    }
    drawing.line(vec![(left, bottom), (end, bottom)], 1.0, GREY);
    for tick in size_axis.ticks() {
        let at = x(tick);
        drawing.line(vec![(at, bottom), (at, bottom + 5.0)], 1.0, GREY);
        let label = units::size(tick as u64);
        drawing.text(
            (at, bottom + 20.0),
            Anchor::Middle,
            Font::Label,
            GREY,
            &label,
        );
    }
    drawing.text(
        ((left + right) / 2.0, bottom + 40.0),
        Anchor::Middle,
        Font::Label,
        INK,
        "message size",
    );
    // The names are at the ends of the curves, from top to bottom, without overlap.
    let mut above = f64::MIN;
    for (name, colour, mark, points) in curves {
        let mut points: Vec<_> = points
            .iter()
            .map(|point| (x(point.0), y(point.1)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(last) = points.last().copied() else {
            continue;
        };
        drawing.line(points.clone(), 2.0, *colour);
        for point in points {
            drawing.mark(point, *mark, *colour);
        }
        let at = (last.1 + 4.0).max(above + 15.0);
        above = at;
        drawing.text((last.0 + 9.0, at), Anchor::Start, Font::Bold, *colour, name);
    }
}

/// Escapes a text and breaks it at spaces into lines that fit.
fn wrapped(text: &str, font: Font) -> Vec<String> {
    let max_length = ((WIDTH - 2.0 * MARGIN) / font.advance()) as usize;
    let mut lines = vec![String::new()];
    for word in escaped(text).to_string().split(' ') {
        let length = |text: &str| text.chars().count();
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if length(line) + 1 + length(word) <= max_length => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::stats::{Bandwidth, Latency, Samples};
    use super::*;
    use crate::escape::is_visible;

    fn row(size: u32, nanoseconds: u64) -> Row {
        let mut samples = Samples::default();
        samples.add(Duration::from_nanos(nanoseconds));
        samples.add(Duration::from_nanos(nanoseconds * 3));
        Row {
            size,
            iterations: 10,
            latency: Latency::of(samples).unwrap(),
            bandwidth: Bandwidth::of(10, size.into(), 0.001),
            lost: None,
        }
    }

    fn captions(title: &str) -> Captions {
        Captions {
            title: title.to_owned(),
            round_trip: true,
            bidirectional: false,
            options: "RC, polled".to_owned(),
            conditions: "rxe0 · a processor, Linux".to_owned(),
        }
    }

    #[test]
    fn plot_has_both_charts_all_points_and_the_conditions() {
        let rows: Vec<Row> = (3..17)
            .map(|power| row(1 << power, 1000 << power))
            .collect();
        let picture = svg::encode(&paint(&captions("RDMA write"), &rows));
        for text in [
            "<svg",
            ">RDMA write<",
            ">RC, polled<",
            ">rxe0 · a processor, Linux<",
            ">Latency, half of the round trip<",
            ">Bandwidth<",
            ">p50<",
            ">p99<",
            ">64 B<",
            ">4 KiB<",
            " ms<",
            " MiB/s<",
            "</svg>",
        ] {
            assert!(picture.contains(text), "{text}: {picture}");
        }
        // Of p50, p99 and the bandwidth.
        assert_eq!(picture.matches("<circle").count(), 14);
        assert_eq!(picture.matches("<rect").count() - 1, 14);
        assert_eq!(picture.matches("<path").count(), 14);
    }

    #[test]
    fn title_is_escaped() {
        let title = "<script>\x1b]&\"'\u{202e}\u{ffff}";
        let drawing = paint(&captions(title), &[row(8, 5)]);
        let picture = svg::encode(&drawing);
        let shown = r"&lt;script&gt;\u{1b}]&amp;&quot;&apos;\u{202e}\u{ffff}";
        assert!(picture.contains(shown), "{picture}");
        assert!(!picture.contains("<script"));
        assert!(picture.chars().all(|c| is_visible(c) || c == '\n'));
        png::encode(&drawing);
    }

    #[test]
    fn plots_of_few_points_or_zeros_succeed() {
        for rows in [vec![], vec![row(8, 5)], vec![row(8, 0)], vec![row(1, 1); 2]] {
            let drawing = paint(&captions(""), &rows);
            assert!(!svg::encode(&drawing).contains("NaN"));
            png::encode(&drawing);
        }
    }

    #[test]
    fn long_captions_are_wrapped_between_words() {
        let text = "word ".repeat(60);
        let lines = wrapped(text.trim_end(), Font::Label);
        assert!(lines.len() > 1);
        assert_eq!(lines.join(" "), text.trim_end());
        assert!(
            lines
                .iter()
                .all(|line| line.len() as f64 * Font::Label.advance() <= WIDTH)
        );
    }

    #[test]
    fn file_is_opened_first_and_unchanged_without_a_plot() {
        let name = format!("ringverbs-plot-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        for name in ["a.gif", "svg", "a"] {
            let error = PlotFile::create(&dir.join(name)).unwrap_err();
            assert!(matches!(error, PlotError::Extension(_)), "{error}");
        }
        let missing = PlotFile::create(&dir.join("no/a.svg")).unwrap_err();
        assert!(missing.to_string().contains("no/a.svg"), "{missing}");
        // Without a plot a new file is removed, and an existing one unchanged.
        let (new, old) = (dir.join("new.SVG"), dir.join("old.png"));
        fs::write(&old, "a plot").unwrap();
        for path in [&new, &old] {
            drop(PlotFile::create(path).unwrap());
        }
        assert!(!new.exists());
        assert_eq!(fs::read_to_string(&old).unwrap(), "a plot");
        for path in [&new, &old] {
            let file = PlotFile::create(path).unwrap();
            file.draw(&captions("drawn"), &[row(8, 5)]).unwrap();
        }
        assert!(fs::read_to_string(&new).unwrap().ends_with("</svg>\n"));
        assert!(fs::read(&old).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
