"""The data set, and the network."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fl_algorithms.tasks.dataset import DatasetTask


class Breaths(Dataset):
    """Recordings (rows, samples) in an .npz file; ``patients`` keeps the rows of one patient together."""

    def __init__(self, path):
        with np.load(path) as file:
            self.signals, self.labels, self.groups = file["signals"], file["labels"], file["patients"].tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return torch.from_numpy(self.signals[row][None]), int(self.labels[row])


class BreathTask(DatasetTask):
    dataset = Breaths


class BreathNet(nn.Module):
    """A convolution over time and a linear head. The methods find "body.*" and "head.*" by name."""

    def __init__(self, channels, samples, outputs, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(channels, width, 5, padding=2), nn.ReLU(), nn.AvgPool1d(4), nn.Flatten())
        self.head = nn.Linear(width * (samples // 4), outputs)

    def forward(self, x):
        return self.head(self.body(x))


def breathnet(settings, inputs, outputs):
    return BreathNet(*inputs, outputs, settings.width)
