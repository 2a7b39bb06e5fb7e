"""How far training has come: epochs and steps, counted. Nothing here touches a file."""

import math


class Progress:
    """Epochs completed, steps done in the current one, and the best score so far.

    steps_per_epoch: of a complete epoch. total_steps: training ends after so many. ended: it has
    ended earlier. All processes count alike, so that they take the same decisions. A process has
    one, which its script counts on; all others only read it.
    """

    def __init__(self, steps_per_epoch, total_steps, epoch=0, step=0, ended=False):
        self.steps_per_epoch, self.total_steps = steps_per_epoch, total_steps
        self.epoch, self.step, self.ended = epoch, step, ended
        self.best_acc1, self.best_epoch = -math.inf, 0

    def __str__(self):
        """In words; the first epoch is epoch 1."""
        if self.step == 0 < self.epoch:
            return f"the end of epoch {self.epoch}"
        return f"epoch {self.epoch + 1} step {self.step}"

    def global_step(self):
        """Steps done, counted over all epochs."""
        return self.epoch * self.steps_per_epoch + self.step

    def remaining(self):
        """Yield (epoch, steps): the epochs that are left, and a range of the steps to do in each.

        The range is empty where only the validation is left. It ends where training is to end. The
        loop counts: it adds to `step`, and calls end_epoch().
        """
        while not self.finished():
            in_this_epoch = self.total_steps - self.epoch * self.steps_per_epoch
            yield self.epoch, range(self.step, min(self.steps_per_epoch, in_this_epoch))

    def finished(self):
        """Whether nothing is left to do: no step, and no validation of a complete epoch."""
        return self.ended or (
            self.global_step() >= self.total_steps and not self.lacks_validation()
        )

    def lacks_validation(self):
        """Whether all steps of an epoch are done, and only its validation is left."""
        return self.step == self.steps_per_epoch

    def end_epoch(self):
        """Count the epoch as completed, after its validation, unless total_steps has cut it."""
        if self.lacks_validation():
            self.epoch, self.step = self.epoch + 1, 0

    def record_score(self, score):
        """Take in the score of the epoch that was ended last; returns whether it is the best.

        score: a number, the higher the better.
        """
        is_best = score > self.best_acc1
        if is_best:
            self.best_acc1, self.best_epoch = float(score), self.epoch + (self.step > 0)
        return is_best

    def stop_early(self):
        """Make this epoch the last, before it is saved."""
        self.ended = True
