//! Plots of latency and bandwidth over the message size.

use std::fmt;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::stats::Row;
use crate::escape::escaped;

/// A curve: name, colour, points.
type Curve = (&'static str, RGBColor, Vec<(f64, f64)>);

/// The reason why there is no plot.
#[derive(Debug)]
pub enum PlotError {
    /// The file's name does not end in `.svg`.
    Extension(String),
    /// The plot could not be drawn or written.
    Draw {
        /// The file.
        file: String,
        /// The reason.
        why: String,
    },
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Extension(file) => {
                write!(f, "plots are SVG files: the name {file} must end in .svg")
            }
            Self::Draw { file, why } => write!(f, "drawing {file}: {why}"),
        }
    }
}

impl std::error::Error for PlotError {}

/// Checks whether a plot can be written under that name; called before measuring.
pub fn check(file: &Path) -> Result<(), PlotError> {
    let svg = file
        .extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("svg"));
    match svg {
        true => Ok(()),
        false => Err(PlotError::Extension(file.display().to_string())),
    }
}

/// Draws the rows into an SVG file.
pub fn draw(file: &Path, title: &str, rows: &[Row]) -> Result<(), PlotError> {
    let mut picture = String::new();
    let failed = |why: String| PlotError::Draw {
        file: file.display().to_string(),
        why,
    };
    paint(&mut picture, title, rows).map_err(|error| failed(error.to_string()))?;
    std::fs::write(file, picture).map_err(|error| failed(error.to_string()))
}

type PlotResult<'a> =
    Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn paint<'a>(picture: &'a mut String, title: &str, rows: &[Row]) -> PlotResult<'a> {
    let area = SVGBackend::with_string(picture, (960, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let title = escaped(title).to_string();
    let area = area.titled(&title, ("sans-serif", 18))?;
    let (left, right) = area.split_horizontally(480);
    let of = |value: &dyn Fn(&Row) -> f64| -> Vec<(f64, f64)> {
        rows.iter()
            .map(|row| (f64::from(row.size), value(row)))
            .collect()
    };
    let microseconds = 1e-3;
    let latency = [
        ("p99", RED, of(&|row| row.latency.p99 as f64 * microseconds)),
        (
            "p50",
            BLUE,
            of(&|row| row.latency.p50 as f64 * microseconds),
        ),
    ];
    chart(&left, "latency", "microseconds", &latency)?;
    let bandwidth = [("", BLUE, of(&|row| row.bandwidth.bytes_per_second * 1e-6))];
    chart(&right, "bandwidth", "MB/s", &bandwidth)?;
    area.present()
}

/// Draws a chart with logarithmic axes.
fn chart<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    name: &str,
    unit: &str,
    curves: &[Curve],
) -> PlotResult<'a> {
    let points = || curves.iter().flat_map(|(_, _, points)| points);
    // Not empty even with one point.
    let range = |axis: fn(&(f64, f64)) -> f64| {
        let values = points()
            .map(axis)
            .filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let low = low.min(high);
        (low / 1.5)..(high * 1.5)
    };
    let mut chart = ChartBuilder::on(area)
        .caption(name, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d(
            range(|point| point.0).log_scale(),
            range(|point| point.1).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc(unit)
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|value| format!("{value}"))
        .light_line_style(WHITE)
        .draw()?;
    for (name, colour, points) in curves {
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3);
        let drawn = chart.draw_series(line)?;
        if !name.is_empty() {
            let colour = *colour;
            let sample = move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour);
            drawn.label(*name).legend(sample);
        }
    }
    if curves.len() > 1 {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE)
            .border_style(BLACK)
            .draw()?;
    }
    Ok(())
}

/// Formats a size briefly.
fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1e6 => format!("{:.0}M", bytes / 1e6),
        bytes if bytes >= 1e3 => format!("{:.0}k", bytes / 1e3),
        bytes => format!("{bytes:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::{Bandwidth, Latency};
    use super::*;
    use crate::escape::is_visible;

    fn row(size: u32, nanoseconds: u64) -> Row {
        Row {
            size,
            iterations: 10,
            latency: Latency::of(vec![nanoseconds, nanoseconds * 3]).unwrap(),
            bandwidth: Bandwidth::of(10, size.into(), 0.001),
        }
    }

    #[test]
    fn a_picture_has_both_charts_and_all_points() {
        let rows: Vec<Row> = (0..10)
            .map(|power| row(1 << power, 1000 << power))
            .collect();
        let mut picture = String::new();
        paint(&mut picture, "write on rxe0", &rows).unwrap();
        for text in [
            "<svg",
            "write on rxe0",
            "latency",
            "bandwidth",
            "p99",
            "</svg>",
        ] {
            assert!(picture.contains(text), "{text}");
        }
        // Three curves of ten points each.
        assert!(picture.matches("<circle").count() >= 30);
    }

    #[test]
    fn a_title_is_text_and_nothing_else() {
        let mut picture = String::new();
        let title = "<script>\x1b]&\"'\u{202e}\u{ffff}";
        paint(&mut picture, title, &[row(8, 5)]).unwrap();
        let shown = r"&lt;script&gt;\u{1b}]&amp;&quot;&apos;\u{202e}\u{ffff}";
        assert!(picture.contains(shown), "{picture}");
        assert!(!picture.contains("<script"));
        assert!(picture.chars().all(|c| is_visible(c) || c == '\n'));
    }

    #[test]
    fn a_plot_of_few_points_or_zeros_succeeds() {
        for rows in [vec![], vec![row(8, 5)], vec![row(8, 0)]] {
            paint(&mut String::new(), "", &rows).unwrap();
        }
    }

    #[test]
    fn only_svg_is_written() {
        assert!(check(Path::new("a/b.svg")).is_ok());
        assert!(check(Path::new("b.SVG")).is_ok());
        let error = check(Path::new("b.png")).unwrap_err();
        assert!(error.to_string().contains("b.png"));
        assert!(check(Path::new("svg")).is_err());
    }
}
