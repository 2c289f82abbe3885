//! A plot with a bar for each row: our time over the stock provider's, and the limit.

use std::fmt::Write as _;

use super::limits;
use super::measure::Results;

const LEFT: f64 = 170.0;
const WIDTH: f64 = 480.0;
const LINE: f64 = 22.0;
const TOP: f64 = 46.0;
/// The ratio at the right edge.
const SCALE: f64 = 1.2;

fn x(ratio: f64) -> f64 {
    LEFT + WIDTH * ratio.clamp(0.0, SCALE) / SCALE
}

/// Returns the plot as SVG; whiskers are quartiles, ticks are limits.
pub fn svg(results: &Results) -> String {
    let rows: Vec<_> = results.rows.iter().filter(|row| !row.is_floor()).collect();
    let bottom = TOP + LINE * rows.len() as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-size=\"13\">Time of one operation over the stock \
         provider's (1.0); red ticks: what is required</text>\n",
        LEFT + WIDTH + 60.0,
        bottom + 16.0
    );
    for step in 0..=4 {
        let ratio = f64::from(step) * 0.25;
        let at = x(ratio);
        let _ = writeln!(
            text,
            "<line x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\" \
             stroke=\"#ddd\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" \
             fill=\"#666\">{ratio}</text>",
            TOP - 6.0,
            TOP - 10.0
        );
    }
    for (i, row) in rows.iter().enumerate() {
        let top = TOP + LINE * i as f64;
        let middle = top + LINE / 2.0;
        let colour = if row.name.starts_with("single-") {
            "#7fb3a6"
        } else {
            "#4a7fb5"
        };
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
             fill=\"{colour}\"/>\
             <line x1=\"{:.1}\" y1=\"{middle:.1}\" x2=\"{:.1}\" y2=\"{middle:.1}\" \
             stroke=\"#222\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{:.2}</text>",
            LEFT - 8.0,
            middle + 4.0,
            row.name,
            top + 4.0,
            x(row.ratio.median) - LEFT,
            LINE - 8.0,
            x(row.ratio.low),
            x(row.ratio.high),
            x(row.ratio.high).max(x(row.ratio.median)) + 5.0,
            middle + 4.0,
            row.ratio.median
        );
        if let Some(limit) = limits::for_row(&row.name).ratio {
            let at = x(limit);
            let _ = writeln!(
                text,
                "<line x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\" \
                 stroke=\"#c33\" stroke-width=\"2\"/>",
                top + 1.0,
                top + LINE - 1.0
            );
        }
    }
    text.push_str("</svg>\n");
    text
}
