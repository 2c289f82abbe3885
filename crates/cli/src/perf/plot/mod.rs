//! Plots of latency and bandwidth over the message size.
//!
//! [`scene`] is the picture as lines, marks and texts, which [`svg`] and [`png`]
//! write.

mod axis;
mod png;
mod scene;
mod svg;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use super::stats::Row;
use super::units;
use crate::escape::escaped;
use axis::{Axis, Ticks};
use scene::{Anchor, Colour, Font, Mark, Scene};

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 28.0;
const CHART_TOP: f64 = 112.0;
const CHART_HEIGHT: f64 = 320.0;
/// Room for the labels of an axis.
const LABELS: f64 = 84.0;

const INK: Colour = Colour(0x22, 0x22, 0x22);
const GREY: Colour = Colour(0x66, 0x66, 0x66);
const GRID: Colour = Colour(0xe3, 0xe3, 0xe3);
// Of Okabe and Ito, told apart with any colour vision; so are the marks.
const BLUE: Colour = Colour(0x00, 0x72, 0xb2);
const VERMILION: Colour = Colour(0xd5, 0x5e, 0x00);
const GREEN: Colour = Colour(0x00, 0x9e, 0x73);

/// The reason why there is no plot.
#[derive(Debug)]
pub enum PlotError {
    /// The file's name ends in neither `.svg` nor `.png`.
    Extension(String),
    /// The file could not be written.
    Write {
        /// The file.
        file: String,
        /// The reason.
        why: io::Error,
    },
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Extension(file) => write!(
                f,
                "plots are SVG or PNG files: the name {file} must end in .svg or .png"
            ),
            Self::Write { file, why } => write!(f, "writing the plot {file}: {why}"),
        }
    }
}

impl std::error::Error for PlotError {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Svg,
    Png,
}

/// A file for a plot, opened before anything is measured.
#[derive(Debug)]
pub struct PlotFile {
    path: PathBuf,
    format: Format,
    file: File,
    /// Whether it is new and empty; then it is removed if there is no plot.
    empty: bool,
}

impl PlotFile {
    /// Opens the file, or creates it. A plot that is there stays until there is
    /// another.
    pub fn create(path: &Path) -> Result<Self, PlotError> {
        let end = path.extension().map(|end| end.to_ascii_lowercase());
        let format = match end.as_deref().and_then(|end| end.to_str()) {
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
        let file = file.map_err(|why| PlotError::Write {
            file: path.display().to_string(),
            why,
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
        let scene = paint(captions, rows);
        let picture = match self.format {
            Format::Svg => svg::encode(&scene).into_bytes(),
            Format::Png => png::encode(&scene),
        };
        self.write(&picture).map_err(|why| PlotError::Write {
            file: self.path.display().to_string(),
            why,
        })
    }

    fn write(&mut self, picture: &[u8]) -> io::Result<()> {
        // A pipe or terminal has no length.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
            self.file.rewind()?;
        }
        self.file.write_all(picture)?;
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
    /// Whether latency is that of half a round trip.
    pub round_trip: bool,
    pub bidirectional: bool,
    /// The options.
    pub options: String,
    /// Device, machine and program.
    pub conditions: String,
}

/// A curve: name, colour, mark, points.
type Curve = (&'static str, Colour, Mark, Vec<(f64, f64)>);

fn paint(captions: &Captions, rows: &[Row]) -> Scene {
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
    let mut scene = Scene::new(WIDTH);
    let mut y = MARGIN + 12.0;
    scene.text(
        (MARGIN, y),
        Anchor::Start,
        Font::Title,
        INK,
        &captions.title,
    );
    y += 24.0;
    for line in wrapped(&captions.options, Font::Label) {
        scene.text((MARGIN, y), Anchor::Start, Font::Label, GREY, &line);
        y += 16.0;
    }
    chart(
        &mut scene,
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
        &mut scene,
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
        scene.text((MARGIN, y), Anchor::Start, Font::Small, GREY, &line);
        y += 14.0;
    }
    scene.height = y - 14.0 + MARGIN;
    scene
}

/// Draws a chart with logarithmic axes between two places on the horizontal.
fn chart(
    scene: &mut Scene,
    (left, right): (f64, f64),
    title: &str,
    (ticks, format): (Ticks, fn(f64) -> String),
    curves: &[Curve],
) {
    scene.text(
        (left, CHART_TOP - 14.0),
        Anchor::Start,
        Font::Bold,
        INK,
        title,
    );
    let names = curves.iter().any(|(name, ..)| !name.is_empty());
    let (left, end) = (left + LABELS, right);
    let right = end - if names { 34.0 } else { 10.0 };
    let bottom = CHART_TOP + CHART_HEIGHT;
    let points = || curves.iter().flat_map(|(.., points)| points);
    let across = Axis::of(points().map(|point| point.0), Ticks::PowersOfTwo, 5);
    let up = Axis::of(points().map(|point| point.1), ticks, 8);
    let x = |size: f64| left + 12.0 + (right - left - 12.0) * across.at(size);
    let y = |value: f64| bottom - CHART_HEIGHT * up.at(value);
    for tick in up.ticks() {
        let at = y(tick);
        scene.line(vec![(left, at), (end, at)], 1.0, GRID);
        scene.text(
            (left - 8.0, at + 4.0),
            Anchor::End,
            Font::Label,
            GREY,
            &format(tick),
        );
    }
    scene.line(vec![(left, bottom), (end, bottom)], 1.0, GREY);
    for tick in across.ticks() {
        let at = x(tick);
        scene.line(vec![(at, bottom), (at, bottom + 5.0)], 1.0, GREY);
        let label = units::size(tick as u64);
        scene.text(
            (at, bottom + 20.0),
            Anchor::Middle,
            Font::Label,
            GREY,
            &label,
        );
    }
    scene.text(
        ((left + right) / 2.0, bottom + 40.0),
        Anchor::Middle,
        Font::Label,
        INK,
        "message size",
    );
    // Names stand at the ends of their curves, from top to bottom, apart.
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
        scene.line(points.clone(), 2.0, *colour);
        for point in points {
            scene.mark(point, *mark, *colour);
        }
        let at = (last.1 + 4.0).max(above + 15.0);
        above = at;
        scene.text((last.0 + 9.0, at), Anchor::Start, Font::Bold, *colour, name);
    }
}

/// Breaks a text into lines that fit, at spaces, and makes it visible.
fn wrapped(text: &str, font: Font) -> Vec<String> {
    let most = ((WIDTH - 2.0 * MARGIN) / font.advance()) as usize;
    let mut lines = vec![String::new()];
    for word in escaped(text).to_string().split(' ') {
        let length = |text: &str| text.chars().count();
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if length(line) + 1 + length(word) <= most => {
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
    fn a_picture_has_both_charts_all_points_and_the_conditions() {
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
    fn a_title_is_text_and_nothing_else() {
        let title = "<script>\x1b]&\"'\u{202e}\u{ffff}";
        let scene = paint(&captions(title), &[row(8, 5)]);
        let picture = svg::encode(&scene);
        let shown = r"&lt;script&gt;\u{1b}]&amp;&quot;&apos;\u{202e}\u{ffff}";
        assert!(picture.contains(shown), "{picture}");
        assert!(!picture.contains("<script"));
        assert!(picture.chars().all(|c| is_visible(c) || c == '\n'));
        png::encode(&scene);
    }

    #[test]
    fn a_plot_of_few_points_or_zeros_succeeds() {
        for rows in [vec![], vec![row(8, 5)], vec![row(8, 0)], vec![row(1, 1); 2]] {
            let scene = paint(&captions(""), &rows);
            assert!(!svg::encode(&scene).contains("NaN"));
            png::encode(&scene);
        }
    }

    #[test]
    fn long_captions_are_broken_between_words() {
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
    fn a_file_is_opened_first_and_left_alone_without_a_plot() {
        let name = format!("ringverbs-plot-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        for name in ["a.gif", "svg", "a"] {
            let error = PlotFile::create(&dir.join(name)).unwrap_err();
            assert!(matches!(error, PlotError::Extension(_)), "{error}");
        }
        let missing = PlotFile::create(&dir.join("no/a.svg")).unwrap_err();
        assert!(missing.to_string().contains("no/a.svg"), "{missing}");
        // Without a plot a new file goes, an old one stays.
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
