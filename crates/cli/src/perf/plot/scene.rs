//! A picture as shapes.

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
    /// Half of its width; a diamond looks smaller.
    pub fn radius(self) -> f64 {
        match self {
            Self::Circle => 4.0,
            Self::Square => 3.5,
            Self::Diamond => 5.0,
        }
    }
}

/// The side of a text that is at its place.
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
    /// Height of the letter M's square.
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

/// A shape, of the picture's units.
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
    /// A text on its base line.
    Text {
        at: (f64, f64),
        anchor: Anchor,
        font: Font,
        colour: Colour,
        text: String,
    },
}

/// A picture on white, later shapes on top.
#[derive(Clone, Debug)]
pub struct Scene {
    pub width: f64,
    pub height: f64,
    pub shapes: Vec<Shape>,
}

impl Scene {
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

    /// Adds a text, made visible.
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
