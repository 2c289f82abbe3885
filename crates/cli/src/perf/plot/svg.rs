//! A drawing as SVG.

use std::fmt::Write as _;

use super::drawing::{Anchor, Colour, Drawing, Mark, Shape};

/// Returns the text of the file.
pub fn encode(drawing: &Drawing) -> String {
    let (width, height) = (drawing.width, drawing.height);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" \
         font-family=\"'Noto Sans Mono','DejaVu Sans Mono',Menlo,Consolas,monospace\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for shape in &drawing.shapes {
        // Writing to a string succeeds.
        let _ = self::shape(&mut out, shape);
    }
    out.push_str("</svg>\n");
    out
}

fn shape(out: &mut String, shape: &Shape) -> std::fmt::Result {
    match shape {
        Shape::Line {
            points,
            width,
            colour,
        } => {
            let points: Vec<String> = points
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" \
                 stroke-linejoin=\"round\"/>",
                points.join(" "),
                hex(*colour)
            )
        }
        Shape::Mark {
            at: (x, y),
            mark,
            colour,
        } => {
            let radius = mark.radius();
            match mark {
                Mark::Circle => write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"")?,
                Mark::Square => write!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{side}\" height=\"{side}\"",
                    x - radius,
                    y - radius,
                    side = 2.0 * radius
                )?,
                Mark::Diamond => write!(
                    out,
                    "<path d=\"M{x:.1} {:.1}l{radius} {radius}l-{radius} {radius}l-{radius} \
                     -{radius}z\"",
                    y - radius
                )?,
            }
            writeln!(out, " fill=\"{}\" stroke=\"#fff\"/>", hex(*colour))
        }
        Shape::Text {
            at: (x, y),
            anchor,
            font,
            colour,
            text,
        } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let weight = if font.is_bold() { "bold" } else { "normal" };
            writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{}\" font-weight=\"{weight}\" \
                 text-anchor=\"{anchor}\" fill=\"{}\">{}</text>",
                font.size(),
                hex(*colour),
                xml_escaped(text)
            )
        }
    }
}

fn hex(Colour(red, green, blue): Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn xml_escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c => out.push(c),
        }
    }
    out
}
