//! A drawing as a list of shapes.

use crate::escape::escaped;

/// Red, green, blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

/// The mark of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    Circle,
    Square,
    Diamond,
}

impl Mark {
    /// Half of the mark's width; a diamond of the same width would look smaller.
    pub fn radius(self) -> f64 {
        match self {
            Self::Circle => 4.0,
            Self::Square => 3.5,
            Self::Diamond => 5.0,
        }
    }
}

/// The part of a text that is at the text's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Size and weight of a text. All characters have the same width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Font {
    Title,
    Bold,
    Label,
    Small,
}

impl Font {
    /// Font size in units of the drawing.
    pub fn size(self) -> f64 {
        match self {
            Self::Title => 15.5,
            Self::Bold | Self::Label => 12.2,
            Self::Small => 10.0,
        }
    }

    /// Width of a character.
    pub fn advance(self) -> f64 {
        self.size() * 0.6
    }

    pub fn is_bold(self) -> bool {
        matches!(self, Self::Title | Self::Bold)
    }
}

/// A shape, in units of the drawing.
#[derive(Clone, Debug)]
pub enum Shape {
    Line {
        points: Vec<(f64, f64)>,
        width: f64,
        colour: Colour,
    },
    Mark {
        at: (f64, f64),
        mark: Mark,
        colour: Colour,
    },
    /// A text on a base line.
    Text {
        at: (f64, f64),
        anchor: Anchor,
        font: Font,
        colour: Colour,
        text: String,
    },
}

/// A drawing on white. Later shapes are on top.
#[derive(Clone, Debug)]
pub struct Drawing {
    pub width: f64,
    pub height: f64,
    pub shapes: Vec<Shape>,
}

impl Drawing {
    pub fn new(width: f64) -> Self {
        Self {
            width,
            height: 0.0,
            shapes: Vec::new(),
        }
    }

    pub fn line(&mut self, points: Vec<(f64, f64)>, width: f64, colour: Colour) {
        self.shapes.push(Shape::Line {
            points,
            width,
            colour,
        });
    }

    pub fn mark(&mut self, at: (f64, f64), mark: Mark, colour: Colour) {
        self.shapes.push(Shape::Mark { at, mark, colour });
    }

    /// Adds a text, which is escaped.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, font: Font, colour: Colour, text: &str) {
        if text.is_empty() {
            return;
        }
        self.shapes.push(Shape::Text {
            at,
            anchor,
            font,
            colour,
            text: escaped(text).to_string(),
        });
    }
}
